"""Admins make and revoke keys; several processes share a store, in memory or in a file."""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from accounting.keys import NO_BUDGET, NO_LIMITS, Budget, KeyLimits, KeyRing, draw_key
from gateway.admin.keys import LATEST, KeyAdmin, KeyBody, KeyChangeBody
from gateway.backends.port import Fleet
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.config.state import StateConfig
from gateway.contracts.values import CallerRole
from gateway.errors import BackendUnavailable, InvalidKey, InvalidRequest, NoSuchKey
from gateway.keys.last_used import KNOWN_FOR_S
from gateway.keys.last_used import STREAM as USED
from gateway.keys.new_key import NewKeyChecks
from gateway.keys.rate_limits import KeyLimiter
from gateway.keys.records import STREAM, changed_data
from gateway.keys.revocations import FOLDER
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from gateway.state.audit import Audit
from gateway.state.local_copy import LocalCopy
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.projection import ProjectionState
from gateway.state.url import parse_state_url
from gateway.weights.records import replace_text
from gateway.wiring.access import KeyParts, make_keys, require_first_key
from gateway.wiring.state import StateParts, make_state
from tests.scripted import ScriptedBackend

WHO = "bootstrap"
FLEET = Fleet(
    {"local": ScriptedBackend(model="qwen3-8b"), "other": ScriptedBackend("other", model="small")},
    {"gpt-4o": "qwen3-8b"},
)
REVISION = make_revision(
    1,
    {"routes": {"chat": {"backends": [{"name": "local", "weight": 100}]}}},
    KnownNames(("local",), (), ()),
)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Process:
    """One gateway process: its store and its keys."""

    state: StateParts
    clock: Clock = field(default_factory=Clock)
    priced: set[str] = field(default_factory=lambda: {"local"})

    def __post_init__(self) -> None:
        self.ring = KeyRing("sk-admin", enabled=True, unix_time=self.clock)
        self.audit = Audit(self.state.store, unix_time=self.clock)
        self.keys: KeyParts = make_keys(self.ring, self.state, unix_time=self.clock)
        self.tasks: list[asyncio.Task[None]] = []
        self.limiter = KeyLimiter()
        self.admin = KeyAdmin(
            self.ring,
            self.keys.projection,
            self.keys.use,
            self.limiter,
            self.audit,
            self.clock,
            NewKeyChecks(
                lambda: REVISION, FLEET, {"style"}, lambda name, model: name in self.priced
            ).warnings,
        )

    async def create(self, **order: Any) -> dict[str, Any]:
        return dict(await self.admin.create(KeyBody.model_validate({"tenant": "acme", **order}), who=WHO))

    async def change(self, key_id: str, **fields: Any) -> dict[str, Any]:
        return dict(await self.admin.change(key_id, KeyChangeBody.model_validate(fields), who=WHO))

    def knows(self, key: str) -> bool:
        try:
            self.keys.authority.authenticate(key)
        except InvalidKey:
            return False
        return True

    async def listed(self) -> list[dict[str, Any]]:
        return [dict(key) for key in await self.admin.show_all()]


def in_memory(streams: MemoryStreams, copies: Path | None = None) -> Process:
    numbers = itertools.count(1.0)
    store = MemoryStateStore(streams, unix_time=lambda: next(numbers), poll_s=0.02)
    url = parse_state_url("redis://shared")
    return Process(StateParts(url, store, NoReplies(), copies, asyncio.get_event_loop().time))


class NoReplies:
    """A store of replies that keeps none."""

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def get(self, tenant: str, key: str) -> None:
        """Nothing."""

    async def put(self, tenant: str, key: str, fingerprint: str, reply: object) -> bool:
        """Dropped."""
        return True


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as loops:
        tasks: list[asyncio.Task[None]] = []
        for one in processes:
            await one.state.open()
            runs = (one.state.run(), one.keys.projection.revocations.run())
            one.tasks = [loops.create_task(each) for each in runs]
            tasks += one.tasks
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
    for one in processes:
        await one.state.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def test_a_key_is_accepted_everywhere_and_after_its_revocation_nowhere() -> None:
    one, other = in_memory(streams := MemoryStreams()), in_memory(streams)
    async with running(one, other):
        made = await one.create(routes=["chat"], adapters=["style"], max_priority=1)
        caller = one.keys.authority.authenticate(made["key"])
        assert (caller.tenant, caller.role, caller.key_id) == ("acme", CallerRole.CALLER, made["id"])
        assert (caller.routes, caller.adapters, caller.max_priority) == (("chat",), ("style",), 1)
        await until(lambda: other.knows(made["key"]))
        await other.admin.revoke(made["id"], who=WHO)
        assert not other.knows(made["key"]), "refused when the call returns"
        await until(lambda: not one.knows(made["key"]))
        assert one.knows("sk-admin") and not await one.listed()
        with pytest.raises(NoSuchKey):
            await one.admin.revoke(made["id"], who=WHO)


async def test_a_key_made_without_limits_is_known_as_such_without_a_comparison_of_its_limits() -> None:
    process = in_memory(MemoryStreams())
    async with running(process):
        caller = process.keys.authority.authenticate((await process.create())["key"])
        assert caller.limits is NO_LIMITS and caller.budget is NO_BUDGET


async def test_a_key_with_names_that_do_not_exist_yet_is_made_with_a_warning_for_each() -> None:
    one = in_memory(MemoryStreams())
    limits = {"tokens_per_minute": 5}
    right = {"routes": ["chat"], "adapters": ["style"], "models": ["qwen3-8b"], "aliases": {"own": "gpt-4o"}}
    async with running(one):
        made = await one.create(**right, model_limits={"qwen3-8b": limits})
        assert made["warnings"] == []
        made = await one.create(
            routes=["chat", "chatt"],
            adapters=["styl"],
            models=["gpt-4o"],
            aliases={"own": "gpt-5"},
            model_limits={"gpt-4o": limits},
        )
        assert one.knows(made["key"])
    assert made["warnings"] == [
        "routes: there is no 'chatt' now; known: chat",
        "adapters: there is no 'styl' now; known: style",
        "models: there is no 'gpt-4o' now; known: qwen3-8b, small",
        "aliases: there is no 'gpt-5' now; known: gpt-4o, local, other, qwen3-8b, small, style",
        "model_limits: there is no 'gpt-4o' now; known: qwen3-8b, small",
    ]


async def test_a_budget_is_refused_where_no_price_counts_and_warns_where_only_some_do() -> None:
    one = in_memory(MemoryStreams())
    daily = {"usd_per_day": 5.0}
    async with running(one):
        assert (await one.create(budget=daily))["warnings"] == [
            "budget: no price covers other now; what they answer costs nothing"
        ]
        assert (await one.create(budget=daily, routes=["chat"]))["warnings"] == []
        assert (await one.create(budget=daily, models=["later"]))["warnings"], "unknown, so it may be priced"
        with pytest.raises(InvalidRequest, match=r"^budget is in US dollars, .*: no price covers other now;"):
            await one.create(budget=daily, models=["small"])
        with pytest.raises(
            InvalidRequest, match=r"^model_limits.small is .* no price covers other now; allowed: "
        ):
            await one.create(model_limits={"qwen3-8b": daily, "small": daily})
        one.priced.clear()
        with pytest.raises(InvalidRequest, match="no price covers local, other now;"):
            await one.create(budget=daily)
        assert len(await one.listed()) == 3, "a refused key is not made"


async def test_a_front_may_pass_every_priority_on_and_a_caller_has_to_be_granted_it() -> None:
    one = in_memory(MemoryStreams())
    async with running(one):
        found = []
        for role in (CallerRole.FRONT, CallerRole.CALLER):
            made = await one.create(role=role)
            caller = one.keys.authority.authenticate(made["key"])
            found.append((caller.role, caller.max_priority, made["max_priority"]))
        assert found == [(CallerRole.FRONT, 1, 1), (CallerRole.CALLER, 0, 0)]
        assert (await one.create(role=CallerRole.FRONT, max_priority=-1))["max_priority"] == -1


async def test_a_changed_key_keeps_what_was_not_given_and_is_in_force_everywhere() -> None:
    one, other = in_memory(streams := MemoryStreams()), in_memory(streams)
    async with running(one, other):
        made = await one.create(
            org="acme-org",
            routes=["chat"],
            aliases={"own": "qwen3-8b"},
            limits={"requests_per_minute": 5, "tokens_per_minute": 100},
            budget={"usd_per_day": 0.1, "usd_per_month": 2.0},
            expires_at=2_000_000,
            comment="why",
        )
        [before] = await one.listed()
        changed = await one.change(
            made["id"],
            limits={"tokens_per_minute": None, "tokens_per_day": 7},
            budget={"usd_per_day": 0.3},
            routes=None,
            models=["qwen3-8b", "later"],
        )
        caller = one.keys.authority.authenticate(made["key"])
        assert (caller.limits, caller.budget) == (KeyLimits(5, None, 7), Budget(300_000_000, 2_000_000_000))
        assert (caller.tenant, caller.org, caller.routes) == ("acme", "acme-org", None)
        assert (caller.models, caller.aliases) == (("qwen3-8b", "later"), (("own", "qwen3-8b"),))
        stays = ("id", "prefix", "created_at", "created_by", "expires_at", "comment", "tenant", "role")
        assert [changed[name] for name in stays] == [before[name] for name in stays]
        assert changed["warnings"] == ["models: there is no 'later' now; known: qwen3-8b, small"]
        await until(lambda: other.keys.authority.authenticate(made["key"]).models is not None)
        assert other.keys.authority.authenticate(made["key"]) == caller
    async with running(later := in_memory(streams)):
        assert later.keys.authority.authenticate(made["key"]) == caller


async def test_two_changes_at_once_are_both_in_force() -> None:
    one, other = in_memory(streams := MemoryStreams()), in_memory(streams)
    async with running(one, other):
        made = await one.create()
        await until(lambda: other.knows(made["key"]))
        await asyncio.gather(
            one.change(made["id"], limits={"tokens_per_minute": 9}),
            other.change(made["id"], limits={"requests_per_minute": 3}),
        )
        await until(lambda: one.keys.authority.by_id(made["id"]).limits == KeyLimits(3, 9, None))


async def test_a_change_does_not_bring_a_revoked_key_back() -> None:
    one, other = in_memory(streams := MemoryStreams()), in_memory(streams)
    async with running(one, other):
        made = await one.create()
        stored = one.ring.get(made["id"])
        assert stored is not None
        await one.admin.revoke(made["id"], who=WHO)
        await one.state.store.append(STREAM, changed_data(stored), author=WHO)
        with pytest.raises(NoSuchKey):
            await one.change(made["id"], comment="late")
        next_one = await one.create()
        await until(lambda: other.knows(next_one["key"]))
        assert not one.knows(made["key"]) and not other.knows(made["key"])


async def test_a_change_is_audited_with_its_values_and_refused_without_any() -> None:
    one = in_memory(MemoryStreams())
    async with running(one):
        made = await one.create(models=["small"])
        with pytest.raises(InvalidRequest, match=r"^the change has no fields; allowed: max_priority, "):
            await one.change(made["id"])
        with pytest.raises(InvalidRequest, match=r"^budget is in US dollars"):
            await one.change(made["id"], budget={"usd_per_day": 5.0})
        with pytest.raises(InvalidRequest, match=r"^expires_at is "):
            await one.change(made["id"], expires_at=5)
        await one.change(made["id"], limits={"tokens_per_minute": 9}, comment="asked for")
        [entry, *_] = await one.audit.entries(1)
        records = one.keys.projection.followed.number
        await one.change(made["id"], limits={"tokens_per_minute": 9})
        assert one.keys.projection.followed.number == records, "a change that changes nothing is no record"
        assert one.keys.authority.by_id(made["id"]).budget == NO_BUDGET
    assert (entry["action"], entry["result"], entry["comment"]) == ("key.change", "done", "asked for")
    assert entry["target"] == f'{made["id"]} to {{"limits":{{"tokens_per_minute":9}},"comment":"asked for"}}'


async def test_over_a_file_a_revocation_is_in_force_elsewhere_soon(tmp_path: Path) -> None:
    config = StateConfig(url=f"sqlite:///{tmp_path}/state.db")
    one, other = (Process(make_state(config, clock=time.monotonic, unix_time=time.time)) for _ in range(2))
    async with running(one, other):
        for _ in range(3):
            made = await one.create()
            await until(lambda: other.knows(made["key"]))  # noqa: B023 - awaited in this turn
            begun = time.monotonic()
            await one.admin.revoke(made["id"], who=WHO)
            await until(lambda: not other.knows(made["key"]))  # noqa: B023
            assert time.monotonic() - begun < 10.0, "a tenth of a second on a machine that does nothing else"
        last = made["key"].rpartition("_")[2].encode()
    kept = contents(tmp_path)
    assert b"acme" in kept and last not in kept, "no file holds a key"


def contents(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


async def test_no_record_and_no_listing_holds_a_key() -> None:
    process = in_memory(streams := MemoryStreams())
    async with running(process):
        made = await process.create(comment="for the shop")
        secret = made["key"].rpartition("_")[2]
        for stream in streams.records.values():
            assert not any(secret.encode() in record.data for record in stream)
        [shown] = await process.listed()
        assert "key" not in shown and secret not in str(shown)
        assert shown["prefix"] == made["prefix"] == made["key"].split("_")[1]
        assert (shown["comment"], shown["created_by"], shown["limits"]) == ("for the shop", WHO, {})


async def test_each_change_is_audited_also_the_refused_one() -> None:
    process = in_memory(MemoryStreams())
    async with running(process):
        made = await process.create()
        await process.admin.revoke(made["id"], who=WHO)
        with pytest.raises(NoSuchKey):
            await process.admin.revoke("key_none", who=WHO)
        entries = await process.audit.entries(3)
    assert [(one["action"], one["result"].split(":")[0]) for one in entries] == [
        ("key.revoke", "refused"),
        ("key.revoke", "done"),
        ("key.create", "done"),
    ]
    assert all(one["who"] == WHO for one in entries)


async def test_while_the_store_is_away_known_keys_work_and_changes_are_refused(tmp_path: Path) -> None:
    process = in_memory(streams := MemoryStreams(), tmp_path)
    async with running(process):
        made = await process.create()
        await until(lambda: LocalCopy(tmp_path, STREAM).head() == 1)
        streams.down = True
        assert process.knows(made["key"]) and not process.knows(draw_key().key)
        with pytest.raises(BackendUnavailable):
            await process.create()
    again = in_memory(streams, tmp_path)
    async with running(again):
        assert again.knows(made["key"]), "at a start, by the local copy"
        with pytest.raises(BackendUnavailable, match="refuses the key from now on"):
            await again.admin.revoke(made["id"], who=WHO)
        assert not again.knows(made["key"])
    later = in_memory(streams, tmp_path)
    async with running(later):
        assert not later.knows(made["key"]), "nor after a restart, by the note"
        streams.down = False
        await until(lambda: len(streams.records[STREAM]) == 2)
        assert streams.records[STREAM][-1].author == WHO
        await until(lambda: not list((tmp_path / FOLDER).iterdir()))
    fresh = in_memory(streams)
    async with running(fresh):
        assert not fresh.knows(made["key"]), "it is stored"


async def test_no_key_is_made_in_a_store_that_has_lost_the_keys_that_are_in_force() -> None:
    streams = MemoryStreams()
    one = in_memory(streams)
    async with running(one):
        kept = await one.create()
        await one.create()
        streams.records[STREAM].clear()
        with pytest.raises(BackendUnavailable, match="it has lost records; number 2 is in force here"):
            await one.create()
        streams.records[STREAM].clear()
        await until(lambda: one.keys.projection.followed.state is ProjectionState.LOST)
        with pytest.raises(BackendUnavailable, match="it has lost records"):
            await one.create()
        assert not streams.records[STREAM] and one.knows(kept["key"])


async def test_a_key_whose_revocation_cannot_be_stored_is_refused_by_every_gateway_that_receives_it(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    here, hears, deaf = (in_memory(streams, tmp_path / name) for name in ("a", "b", "c"))
    async with running(here, hears, deaf):
        made, kept = await here.create(), await here.create()
        everyone = (here, hears, deaf)
        await until(lambda: all(one.knows(kept["key"]) for one in everyone))
        streams.stores.discard(deaf.state.store)
        streams.full = True
        with pytest.raises(BackendUnavailable, match="the revocation is not stored"):
            await here.admin.revoke(made["id"], who=WHO)
        assert not here.knows(made["key"]) and not hears.knows(made["key"]), "when the call returns"
        assert deaf.knows(made["key"])
        neighbour = in_memory(streams, tmp_path / "a")
        async with running(neighbour):
            assert not neighbour.knows(made["key"]), "by the note that lies on its machine"
        # The gateway that was asked ends; the one that received the revocation stores it.
        for task in here.tasks:
            task.cancel()
        streams.full = False
        await until(lambda: not deaf.knows(made["key"]))
        assert all(one.knows(kept["key"]) for one in (hears, deaf))


async def test_a_revocation_is_not_held_back_by_its_audit_record(tmp_path: Path) -> None:
    process = in_memory(streams := MemoryStreams(), tmp_path)
    process.audit = Audit(process.state.store, unix_time=process.clock, required=True)
    process.admin = replace(process.admin, audit=process.audit)
    async with running(process):
        made = await process.create()
        streams.down = True
        with pytest.raises(BackendUnavailable, match="the revocation is not stored"):
            await process.admin.revoke(made["id"], who=WHO)
        assert not process.knows(made["key"])


async def test_a_note_of_another_process_is_found_while_the_gateway_runs(tmp_path: Path) -> None:
    streams = MemoryStreams()
    here, neighbour = in_memory(streams, tmp_path), in_memory(streams, tmp_path)
    async with running(here, neighbour):
        made = await here.create()
        await until(lambda: neighbour.knows(made["key"]))
        streams.down = True
        with pytest.raises(BackendUnavailable):
            await here.admin.revoke(made["id"], who=WHO)
        await until(lambda: not neighbour.knows(made["key"]))
        assert (tmp_path / FOLDER / made["id"]).read_text() == WHO


async def test_a_key_that_was_revoked_while_the_disk_was_full_is_refused_after_a_restart(
    tmp_path: Path,
) -> None:
    streams, (limit, hard) = MemoryStreams(), resource.getrlimit(resource.RLIMIT_FSIZE)
    here = in_memory(streams, tmp_path)
    async with running(here):
        made = await here.create()
        await until(lambda: (tmp_path / f"{STREAM}.jsonl").exists())
        streams.down = True
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            with capture_logs(), pytest.raises(BackendUnavailable):  # the log may be a file
                await here.admin.revoke(made["id"], who=WHO)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for task in here.tasks:
            task.cancel()
        restarted = in_memory(streams, tmp_path)
        async with running(restarted):
            assert not restarted.knows(made["key"])
            streams.down = False
            await until(lambda: not restarted.keys.projection.revocations.unstored(made["id"]))


async def test_a_note_that_can_be_neither_read_nor_deleted_refuses_its_key_and_hides_no_other(
    tmp_path: Path,
) -> None:
    streams = MemoryStreams()
    here, neighbour = in_memory(streams, tmp_path), in_memory(streams)
    async with running(here, neighbour):
        made = [await here.create() for _ in range(3)]
        # A folder can be neither read nor deleted as a file, like a file of another user.
        (tmp_path / FOLDER / made[0]["id"]).mkdir(parents=True)
        (tmp_path / FOLDER / made[1]["id"]).write_bytes(b"\xff")
        (tmp_path / FOLDER / made[2]["id"]).write_text(WHO)
        await until(lambda: not any(neighbour.knows(one["key"]) for one in made))
        last = await here.create()
        await here.admin.revoke(last["id"], who=WHO)
        await until(lambda: not neighbour.knows(last["key"]))
        assert not any(task.done() for task in here.tasks)


async def test_what_an_interrupted_write_of_a_note_leaves_is_no_revoked_key(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / FOLDER / "key_1", "\ud800")
    [left] = (tmp_path / FOLDER).iterdir()
    assert left.name not in in_memory(MemoryStreams(), tmp_path).keys.projection.revocations


async def test_a_list_of_many_keys_lets_other_work_run_meanwhile() -> None:
    process, turns = in_memory(MemoryStreams()), itertools.count()

    async def other() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    async with running(process), asyncio.TaskGroup() as tasks:
        for _ in range(200):
            await process.create()
        meanwhile = tasks.create_task(other())
        before = next(turns)
        assert len(await process.listed()) == 200
        assert next(turns) - before >= 10
        meanwhile.cancel()


async def test_a_listed_key_shows_what_it_has_used_of_each_limit_and_budget() -> None:
    process = in_memory(MemoryStreams())
    async with running(process):
        made = await process.create(
            limits={"tokens_per_day": 1_000},
            budget={"usd_per_day": 2},
            model_limits={"qwen3-8b": {"tokens_per_minute": 100, "usd_per_month": 1}},
        )
        caller = process.keys.authority.authenticate(made["key"])
        await process.limiter.reserve(caller, 60, lambda: 5 * 10**8, "qwen3-8b")
        [shown] = await process.listed()
    assert (shown["used"], shown["spent"]) == ({"tokens_per_day": 60}, {"usd_per_day": 0.5})
    assert shown["model_used"] == {"qwen3-8b": {"tokens_per_minute": 60, "usd_per_month": 0.5}}


async def test_a_key_expires_and_is_not_made_expired() -> None:
    process = in_memory(MemoryStreams())
    async with running(process):
        made = await process.create(expires_at=process.clock.now + 10)
        assert process.knows(made["key"]) and not (await process.listed())[0]["expired"]
        process.clock.now += 10
        assert not process.knows(made["key"]) and (await process.listed())[0]["expired"]
        with pytest.raises(InvalidRequest, match="expires_at"):
            await process.create(expires_at=process.clock.now)


async def test_a_key_that_could_not_be_shown_is_not_made_and_an_older_one_hides_no_other() -> None:
    """``9999-12-31T23:59:59-12:00`` cannot be written in UTC: such a key once broke the list of keys."""
    process = in_memory(MemoryStreams())
    async with running(process):
        with pytest.raises(InvalidRequest, match=r"expires_at is beyond it; allowed: .* at the latest"):
            await process.create(expires_at="9999-12-31T23:59:59-12:00")
        assert await process.listed() == []
        await process.create(expires_at="9999-12-31T23:59:59Z")
        [made] = process.ring.created
        late = replace(made.record, key_id="key_late", expires_at=LATEST + 43_200)
        process.ring.add(replace(made, record=late, prefix="late"))
        assert [key["expires_at"] for key in await process.listed()] == ["9999-12-31T23:59:59+00:00"] * 2


async def test_a_record_that_is_not_understood_makes_no_key_and_hides_no_revocation() -> None:
    process = in_memory(MemoryStreams())
    async with running(process):
        made = await process.create()
        strange: list[dict[str, Any]] = [
            {"type": "rotated", "id": made["id"]},
            {"type": "made", "id": "key_2"},
            {"type": "revoked", "id": made["id"], "why": "a newer version says why"},
        ]
        for record in strange:
            await process.state.store.append(STREAM, orjson.dumps(record), author="newer")
        await until(lambda: not process.knows(made["key"]))
        assert not await process.listed()


async def test_the_last_use_is_told_in_batches_and_seldom() -> None:
    one, other = in_memory(streams := MemoryStreams()), in_memory(streams)
    async with running(one, other):
        keys = [await one.create() for _ in range(3)]
        assert (await one.listed())[0]["last_used_at"] is None
        for _ in range(100):
            for made in keys[:2]:
                one.keys.authority.authenticate(made["key"])
        assert (await one.listed())[0]["last_used_at"] == "1970-01-12T13:46:40+00:00"
        assert USED not in streams.records or not streams.records[USED], "nothing is written for a request"
        await one.keys.use.publish()
        assert len(streams.records[USED]) == 1, "one record for all keys"
        await until(
            lambda: (
                len(other.ring.created) == 3
                and other.keys.use.last(other.ring.created[1].record.key_id) is not None
            )
        )
        assert (await other.listed())[2]["last_used_at"] is None
        one.clock.now += 60
        one.keys.authority.authenticate(keys[0]["key"])
        await one.keys.use.publish()
        assert len(streams.records[USED]) == 1, "known well enough"
        one.clock.now += KNOWN_FOR_S
        one.keys.authority.authenticate(keys[0]["key"])
        await one.keys.use.publish()
        assert list(orjson.loads(streams.records[USED][1].data)) == [keys[0]["id"]]
        streams.down = True
        one.clock.now += KNOWN_FOR_S
        one.keys.authority.authenticate(keys[0]["key"])
        await one.keys.use.publish()
        streams.down = False
        await one.keys.use.publish()
        assert len(streams.records[USED]) == 3, "told when the store is back"


@pytest.mark.parametrize("length", [1, 31])
def test_a_first_key_that_is_short_stops_the_start_with_the_command_that_makes_a_long_one(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    reason = f"has {length} characters; allowed: 32 or more; make one with: openssl rand -hex 32"
    short = "k" * length
    with pytest.raises(ConfigError, match=f"^SLUICE_ADMIN_KEY {reason}$"):
        require_first_key(Settings(), short)
    require_first_key(Settings.model_validate({"auth": {"enabled": False}}), short)
    require_first_key(Settings(), "k" * 32)
    monkeypatch.setenv("SLUICE_FRONT_KEY", short)
    with pytest.raises(ConfigError, match=f"^SLUICE_FRONT_KEY {reason}$"):
        require_first_key(Settings(), "k" * 32)
    monkeypatch.setenv("SLUICE_FRONT_KEY", "f" * 32)
    require_first_key(Settings(), None)


def test_one_key_for_the_admin_and_the_front_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_FRONT_KEY", "k" * 32)
    with pytest.raises(ConfigError, match="SLUICE_FRONT_KEY is SLUICE_ADMIN_KEY"):
        require_first_key(Settings(), "k" * 32)
    require_first_key(Settings(), "a" * 32)
