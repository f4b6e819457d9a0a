"""`sluice doctor`: checks everything a gateway needs, without serving."""

import asyncio
import logging
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import structlog
from rich.console import Console
from rich.status import Status

from accounting.events import WriteFailed
from accounting.options import Durability
from budgeting.values import Message, Role
from engine.process import LOG_LEVEL_VARIABLE
from gateway.backends.bedrock.backend import BedrockBackend
from gateway.backends.port import Work, makes_vectors
from gateway.backends.workers.inspection import Inspection
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.contracts.values import Sampling
from gateway.health.probe import short_work
from gateway.http.local_protocol import is_loopback
from gateway.prompts.published import PromptChanged
from gateway.state.errors import StateUnavailable
from gateway.state.port import StateStore
from gateway.state.projection import ProjectionState
from gateway.weights.errors import FetchError
from gateway.weights.progress import bar
from gateway.weights.values import OnProgress
from gateway.wiring.access import MIN_KEY_CHARS, require_first_key
from gateway.wiring.build import build
from gateway.wiring.engine import EngineParts
from gateway.wiring.running import Gateway
from gateway.wiring.state import StateParts
from ops.cli.console import print_findings, print_json
from ops.cli.startup import start_errors
from resilience.failures import BackendFailure

T = TypeVar("T")

ENGINE_TIMEOUT_S = 120.0
BEDROCK_TIMEOUT_S = 30.0
LOW_DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """The result of one check. ``hint`` says what to do if it is not ok."""

    check: str
    ok: bool
    detail: str
    hint: str = ""


def doctor(config: Path | None, *, as_json: bool) -> int:
    """Run all checks and print them; returns the exit code, 1 if a check fails."""
    console = Console(stderr=as_json)
    with console.status("checking…") as status, _quiet_logs():
        findings = asyncio.run(examine(config, lambda source: _bar(console, status, source)))
    healthy = all(finding.ok for finding in findings)
    if as_json:
        print_json({"ok": healthy, "checks": [asdict(f) for f in findings]})
    else:
        marks = {True: ("green", "ok"), False: ("red", "wrong")}
        print_findings((*marks[one.ok], one.check, one.detail, one.hint) for one in findings)
    return 0 if healthy else 1


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silence the logs of this process and its engine, since the table reports all faults."""
    os.environ[LOG_LEVEL_VARIABLE] = "error"
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.reset_defaults()


async def examine(
    config: Path | None, watch: Callable[[str], AbstractContextManager[OnProgress]]
) -> list[DoctorCheck]:
    """All checks, in the order of a gateway's start; ``watch`` shows the progress of fetching weights."""
    found = [DoctorCheck("python", True, platform.python_version())]
    settings = _guarded("config", lambda: load_settings(config), found, str(config or "defaults"))
    if settings is None:
        return found
    found += [_disk(settings.ledger.folder), *files_of_batches(settings), admin_keys(settings)]
    configured = settings
    settings, lacking = _without_missing_redis(settings)
    found += lacking
    made = _places_to_make(settings)
    settings = _with_nothing_made(settings)
    # A random key, because faults of the real one are reported by ``admin_keys``.
    key = secrets.token_hex(MIN_KEY_CHARS)
    gateway = _guarded(
        "model folder, prompts, adapters, routing",
        lambda: build(settings, admin_key=key),
        found,
        ", ".join(filter(None, (_model(settings), settings.prompts.folder, settings.routing.file))),
    )
    if gateway is None:
        return found
    models = gateway.core.model.models
    found.append(DoctorCheck("token counting", True, models.default.tokenizer.encoder))
    state = gateway.core.base.state
    if (file := made.state) is not None:
        found.append(_place("state store", configured.state.url, file))
    elif settings.state.url == configured.state.url:
        unreadable = partial(_unreadable, state.store)
        found.append(await _opened("state store", state.url.shown, state.open, unreadable))
    found += records_lost(state)
    found += [await _routing(gateway), await _published(gateway)]
    found.append(await _ledger(gateway, configured.ledger.shown, made.ledger))
    found.append(await _response_cache(gateway))
    await state.close()
    for weights in gateway.core.base.weights.values():
        try:
            if weights.remote:
                with watch(weights.source) as on_progress:
                    await weights.fetch(on_progress)
        except FetchError as error:
            return [*found, _start_error("weights", error)]
    engines = gateway.core.backends.engines.in_process
    if not engines:
        found.append(DoctorCheck("engine", True, "none in this process (engine.kind: none)"))
    found += [await _engine(gateway, engine) for engine in engines]
    for name, inspections in (await gateway.serving.inspections.now()).items():
        found += [_worker(name, one) for one in inspections]
    # The inspection has found the models of the workers.
    found.append(_prices(gateway))
    if gateway.core.generation.answers.cache is not None:
        found.append(_similar_questions(gateway))
    for name, text in models.own.items():
        found.append(DoctorCheck(f"token counting {name}", True, text.tokenizer.encoder))
    for name, backend in gateway.core.backends.fleet.backends.items():
        if isinstance(backend, BedrockBackend):
            found.append(await _bedrock(name, backend))
    return found


async def _response_cache(gateway: Gateway) -> DoctorCheck:
    check, answers = "response cache", gateway.core.generation.answers
    if answers.cache is None:
        return DoctorCheck(check, True, "off")
    error = await answers.cache.check()
    await answers.cache.close()
    detail = f"stored in {answers.place}" if error is None else f"{answers.place}: {error}"
    return _checked(check, error is None, detail, "start Redis, or correct response_cache.url")


def _similar_questions(gateway: Gateway) -> DoctorCheck:
    """Whether a backend makes the embeddings with which routes compare questions."""
    check, control, fleet = "similar questions", gateway.core.control, gateway.core.backends.fleet
    stored = control.routing.in_force
    config = control.routing.seed.config if stored is None else stored.draft.config
    caches = {
        name: route.get("response_cache") or {}
        for name, route in (config or {"routes": {}})["routes"].items()
    }
    models = {name: cache["similar"]["model"] for name, cache in caches.items() if cache.get("similar")}
    if not models:
        return DoctorCheck(check, True, "only exact matches: no route has an embedding model")
    vectors = [one for one in fleet.backends.values() if makes_vectors(one)]
    known = {name for one in vectors for name in (one.model, one.name)}
    lacking = sorted(name for name, model in models.items() if fleet.aliases.get(model, model) not in known)
    if lacking:
        missing, routes = ", ".join(sorted({models[name] for name in lacking})), ", ".join(lacking)
        hint = f"start a worker with that model, or correct response_cache.similar.model of {routes}"
        return DoctorCheck(check, False, f"no backend makes embeddings with {missing}", hint)
    return DoctorCheck(check, True, ", ".join(f"{name} by {model}" for name, model in sorted(models.items())))


def _prices(gateway: Gateway) -> DoctorCheck:
    """Which backends have a price; the others cost nothing, also to the budgets of keys and tenants."""
    backends, is_priced = gateway.core.backends.fleet.backends, gateway.core.accounts.is_priced
    free = [name for name, backend in backends.items() if not is_priced(name, backend.model)]
    lacking = f"none for {', '.join(free)}: what they answer costs nothing, and no budget limits it"
    return DoctorCheck("prices", True, lacking if free else "every backend has one")


def _checked(check: str, ok: bool, detail: str, hint: str) -> DoctorCheck:
    """A check that has its hint only if it is not ok."""
    return DoctorCheck(check, ok, detail, "" if ok else hint)


def _disk(journal: Path | None) -> DoctorCheck:
    folder = _existing(journal or Path())
    free = shutil.disk_usage(folder).free
    detail, hint = f"{free / 2**30:.1f} GiB free in {folder}", "free disk space: the ledger is written here"
    return _checked("disk", free >= LOW_DISK_BYTES, detail, hint)


def files_of_batches(settings: Settings) -> list[DoctorCheck]:
    """Whether files can be stored; a bucket is not asked."""
    section = settings.batches
    if not section.enabled or settings.ledger.in_memory or section.folder.startswith("s3://"):
        return []
    there = _existing(Path(section.folder))
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    hint = "set batches.folder to a folder that the gateway may write to, or batches.enabled: false"
    return [_checked("files", writable, str(Path(section.folder).absolute()), hint)]


def _without_missing_redis(settings: Settings) -> tuple[Settings, list[DoctorCheck]]:
    """If the client of Redis is missing: memory in place of Redis, so that the other checks go on."""
    state, cache = settings.state, settings.response_cache
    urls = {"state.url": state.url, "state.limits_url": state.limits_url, "response_cache.url": cache.url}
    keys = [key for key, url in urls.items() if (url or "").startswith(("redis://", "rediss://"))]
    if not keys or find_spec("redis") is not None:
        return settings, []
    url = "memory://" if "state.url" in keys else state.url
    update = {
        "state": state.model_copy(update={"url": url, "limits_url": None}),
        "response_cache": cache.model_copy(update={"url": None}),
    }
    detail, hint = f"not installed; needed by {', '.join(keys)}", "pip install 'sluice-gateway[redis]'"
    return settings.model_copy(update=update), [DoctorCheck("client of Redis", False, detail, hint)]


@dataclass(frozen=True, slots=True)
class _Places:
    """The files and folders that the first start makes; the doctor makes none of them."""

    state: Path | None
    ledger: Sequence[Path]


def _places_to_make(settings: Settings) -> _Places:
    name = settings.state.url.removeprefix("sqlite:///")
    state = (
        None if name in ("", settings.state.url) or name.startswith(":memory:") or "?" in name else Path(name)
    )
    ledger = (settings.ledger.file, settings.ledger.folder)
    return _Places(
        None if state is None or os.path.exists(state) else state,
        [place for place in ledger if place is not None and not os.path.exists(place)],
    )


def _with_nothing_made(settings: Settings) -> Settings:
    """The settings with memory in place of files and folders that do not exist."""
    made, state, ledger = _places_to_make(settings), settings.state, settings.ledger
    if made.state is not None:
        state = state.model_copy(update={"url": "memory://"})
    if ledger.folder in made.ledger:
        ledger = ledger.model_copy(update={"durability": Durability.MEMORY})
    if ledger.file in made.ledger:
        ledger = ledger.model_copy(update={"url": "sqlite+aiosqlite://"})
    return settings.model_copy(update={"state": state, "ledger": ledger})


def _place(check: str, shown: str, place: Path) -> DoctorCheck:
    """Whether a start can make a file or a folder."""
    there = _existing(place.parent)
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return DoctorCheck(check, True, f"{shown}; {place} is made at the first start")
    reason = "no permission to write there" if there.is_dir() else f"{there} is not a folder"
    hint = "start where the gateway may write, or name another place"
    return DoctorCheck(check, False, f"{shown}: {place} cannot be made ({reason})", hint)


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists for this user."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if os.path.exists(one))


def _model(settings: Settings) -> str:
    """The folder or source that the gateway reads a model's files from."""
    engine = settings.engine
    return engine.model if engine.kind != "none" else engine.tokenizer or "no model in this process"


def admin_keys(settings: Settings) -> DoctorCheck:
    if not settings.auth.enabled:
        server = settings.server
        local = is_loopback(server.host) and is_loopback(server.admin_host or server.host)
        hint = "set auth.enabled: true, or listen on loopback only"
        return _checked("keys", local, "off: every caller is the operator", hint)
    try:
        require_first_key(settings, os.environ.get("SLUICE_ADMIN_KEY"))
    except ConfigError as error:
        hint = "set SLUICE_ADMIN_KEY, or switch keys off with SLUICE_AUTH__ENABLED=false (as make run does)"
        return _checked("keys", False, str(error), hint)
    return _checked("keys", True, "required", "")


def _guarded(check: str, make: Callable[[], T], found: list[DoctorCheck], detail: str) -> T | None:
    try:
        made = make()
    except Exception as error:
        found.append(_start_error(check, error))
        return None
    found.append(DoctorCheck(check, True, detail))
    return made


def _start_error(check: str, error: Exception) -> DoctorCheck:
    """The failed check for an error that an operator can correct. Raises any other error."""
    reported = [str(fault) or "timed out" for fault in start_errors(error)]
    if not reported:
        raise error
    return DoctorCheck(check, False, "\n".join(reported), "correct what the message names")


async def _opened(
    check: str, url: str, open_it: Callable[[], Awaitable[None]], fault: Callable[[], Awaitable[str | None]]
) -> DoctorCheck:
    """``fault`` is asked after ``open_it``: why the store does not work, or ``None``."""
    try:
        await open_it()
    except Exception as error:
        return _start_error(check, error)
    hint = "check that the server can be reached from here, and that user and password are right"
    if url.startswith("sqlite"):
        hint = "check that the folder exists, the file is writable and the disk is not full"
    found = await fault()
    return _checked(check, found is None, url if found is None else f"{url}: {found}", hint)


async def _unreadable(store: StateStore) -> str | None:
    try:
        await store.heads()
    except StateUnavailable as error:
        return error.reason
    return None


def records_lost(state: StateParts) -> list[DoctorCheck]:
    """Which streams of the store are not those in force here, where some are not."""
    hint = "restore the store, or accept its content: docs/state.md, When the store has lost records"
    wrong = {ProjectionState.LOST: "lost records", ProjectionState.REFUSED: "a record cannot be applied"}
    return [
        DoctorCheck(f"state {name}", False, f"{wrong[one.state]}; number {one.number} is in force here", hint)
        for name, one in sorted(state.followers.items())
        if one.state in wrong
    ]


async def _routing(gateway: Gateway) -> DoctorCheck:
    """Which routing a start would use: the store's last revision, otherwise the file."""
    book = gateway.core.control.routing
    seed = book.seed
    file = seed.source
    if book.unusable is not None:
        hint = f"revision {book.number} stays in force; correct what the message names, or roll back"
        return DoctorCheck("routing", False, book.unusable.reason, hint)
    if book.head:
        await book.compare_file()
        detail = f"revision {book.head} in the state store"
        if not book.pending:
            return DoctorCheck("routing", True, f"{detail}; {file} is not used")
        changes = ", ".join(f"{one.path}: {one.before} -> {one.after}" for one in book.pending)
        detail += f"; {file} was changed and is not in force: {changes}"
        return DoctorCheck("routing", True, detail, f"sluice routes apply {seed.file}")
    if seed.fault is not None:
        return DoctorCheck("routing", False, str(seed.fault), "correct what the message names")
    return DoctorCheck("routing", True, f"{file}, as revision 1")


async def _published(gateway: Gateway) -> DoctorCheck:
    check = "prompt versions"
    try:
        count = await gateway.core.model.publishing.check()
    except PromptChanged as error:
        return DoctorCheck(check, False, str(error), "publish the changed text under a new id")
    except StateUnavailable as error:
        detail = f"cannot be compared with the published texts: {error}"
        return DoctorCheck(check, False, detail, "see the check `state store`")
    return DoctorCheck(check, True, f"{count} published, unchanged")


async def _ledger(gateway: Gateway, shown: str, places: Sequence[Path]) -> DoctorCheck:
    """Whether the ledger opens, and whether the ``places`` that a start makes for it can be made."""
    ledger = gateway.core.accounts.ledger
    failures: list[WriteFailed] = []
    gateway.core.base.events.attach(failures.append, WriteFailed)

    async def fault() -> str | None:
        return failures[0].error_type if failures else None

    finding = await _opened("ledger", shown, ledger.open, fault)
    await ledger.close(1.0)
    checks = [_place("ledger", shown, place) for place in places]
    return next((one for one in (finding, *checks) if not one.ok), (*checks, finding)[0])


@contextmanager
def _bar(console: Console, status: Status, source: str) -> Iterator[OnProgress]:
    """Show a progress bar in place of the spinner; only one of them can use the line."""
    status.stop()
    try:
        with bar(console, source) as on_progress:
            yield on_progress
    finally:
        status.start()


async def _engine(gateway: Gateway, engine: EngineParts) -> DoctorCheck:
    host = engine.host
    check = "engine" if engine.name is None else f"engine {engine.name}"
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_S):
            facts = await host.start()
            found = await gateway.serving.health.probe(engine.backends)
    except Exception as error:
        return _start_error(check, error)
    finally:
        await host.stop(5.0)
    details = ", ".join(f"{name} {value}" for name, value in facts.details.items())
    detail = f"{engine.section.model_id}: {details}; {facts.total_blocks} blocks of {facts.block_size} tokens"
    healthy = all(one["status"] == "healthy" for one in found.values())
    return _checked(check, healthy, detail, f"the test generation failed: {found}")


def _worker(name: str, found: Inspection) -> DoctorCheck:
    check = f"worker {found.url} ({name})"
    if found.unusable:
        fault, _, hint = found.faults[0].partition("; ")
        return DoctorCheck(check, False, fault, hint)
    length = "" if found.max_model_len is None else f", {found.max_model_len} tokens"
    token = "generates no text" if found.latency_ms is None else f"one token in {found.latency_ms} ms"
    detail = f"serves {found.model}{length}, tokenizer {found.tokenizer}, {token}"
    return DoctorCheck(check, not found.faults, detail, "; ".join(found.faults))


async def _bedrock(name: str, backend: BedrockBackend) -> DoctorCheck:
    """Ask for one token, vector or score: only a real answer proves that the account may use the model."""
    check = f"Bedrock access ({name})"
    work = Work("doctor", (), (Message(Role.USER, "test"),), Sampling(max_tokens=1))
    try:
        async with asyncio.timeout(BEDROCK_TIMEOUT_S):
            usage = await short_work(backend, work)
    except (BackendFailure, TimeoutError) as error:
        reported = str(error) or f"no answer within {BEDROCK_TIMEOUT_S:g} s"
        if isinstance(error, BackendFailure) and error.__cause__ is not None:
            reported += f": {error.__cause__}"
        hint = "check credentials, region and model access: docs/bedrock.md"
        return DoctorCheck(check, False, reported, hint)
    finally:
        backend.stop()
    detail = f"{backend.model} answered a test of {usage.input_tokens} tokens"
    return DoctorCheck(check, True, detail)
