"""What holds for the whole suite."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, is_hypothesis_test, settings

import budgeting.counting
import budgeting.vocabulary
from budgeting.tokenizer_files import TokenizerFiles
from budgeting.vocabulary import EncodeElsewhere, Vocabulary
from tests.fast import Guard, is_slow_file, is_slow_test

if TYPE_CHECKING:
    from tests.conformance.harness import Specimen
    from tests.conformance.vllm_in_process import RunningVllm

# Neither a single example has a deadline nor the making of them: on a shared machine a pause of half a second
# says nothing about the code. Tests of speed measure it themselves, and every test has its own limit (`timeout`
# in pyproject.toml). The examples are much the same in every run, so that a change is refused for what it
# changed; SLUICE_TEST_RANDOM=1 looks for new ones.
SEARCHES = "SLUICE_TEST_RANDOM" in os.environ
settings.register_profile(
    "suite",
    deadline=None,
    max_examples=100 if SEARCHES else 25,
    derandomize=not SEARCHES,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


# To make a client, httpx reads the certificates of all authorities for 25 ms of a core; thousands are made here, and
# all of them ask this machine. OpenAI's and Anthropic's clients use httpx2.
for _transports in (httpx._transports.default, httpx2._transports.default):
    _transports.create_ssl_context = functools.cache(_transports.create_ssl_context)  # type: ignore[attr-defined]


# To make a client, botocore reads its description of the service, for 100 ms and more. The environment of
# `make clients` has no botocore.
with contextlib.suppress(ModuleNotFoundError):
    import botocore.loaders

    _read = botocore.loaders.JSONFileLoader.load_file
    _read_once = functools.cache(functools.partial(_read, botocore.loaders.JSONFileLoader()))
    botocore.loaders.JSONFileLoader.load_file = lambda self, file_path: _read_once(file_path)


# To find the order of a vocabulary's merges takes 60 ms; hundreds of tests read the same one. What was forked off a
# process that has done so (tests/fork_server.py) keeps its own. A whole vocabulary takes 35 ms without it.
if not hasattr(budgeting.vocabulary.ByteBpe, "cache_info"):
    budgeting.vocabulary.ByteBpe = functools.cache(budgeting.vocabulary.ByteBpe)  # type: ignore[assignment, misc]
    _made: dict[tuple[str, frozenset[tuple[str, str]]], Vocabulary] = {}

    def _vocabulary_of(files: TokenizerFiles, *, elsewhere: EncodeElsewhere | None = None) -> Vocabulary:
        content = files.tokenizer_json, frozenset(files.specials.items())
        if content not in _made:
            _made[content] = Vocabulary(files)
        vocabulary = copy.copy(_made[content])
        vocabulary._elsewhere = elsewhere
        return vocabulary

    budgeting.counting.Vocabulary = _vocabulary_of  # type: ignore[assignment, misc]


# Folders whose tests start servers, the longest first: what is short fills the gaps at the end.
LONG = (
    "ray", "conformance", "vllm", "models", "engine", "integration", "weights", "benchmarks", "evaluation", "gateway",
    "bedrock", "state", "deploy", "chaos", "gpus", "replay", "workers", "shadow", "tests",
)  # fmt: skip


# A preparation of a test that is among the slowest durations.
LONG_S = 0.1
FAST = pytest.StashKey[Guard]()
FAST_EXAMPLES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests without processes, engines and servers")


def _is_whole(config: pytest.Config) -> bool:
    """Whether all files are asked for, slow ones too."""
    return not config.getoption("--fast") and config.args == config.getini("testpaths")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        fast = config.getoption("--fast")
        if fast or _is_whole(config):
            from tests import fork_server

            fork_server.install_for_tests(fast=fast)
        return  # the tests run in others
    gc.disable()  # until all is imported
    if hasattr(config, "workerinput"):
        _report_what_is_shown(config)
    if config.getoption("--fast"):
        config.stash[FAST] = Guard()
    else:
        from tests import fork_server

        fork_server.install()
        if config.getoption("markexpr") == "serial" and fork_server.AVAILABLE:
            fork_server.server()  # nearly all need it, and it imports while they are collected


def _report_what_is_shown(config: pytest.Config) -> None:
    """A process of pytest-xdist sends five messages a test, for a millisecond of a core; nothing is shown of four."""
    (worker,) = (one for one in config.pluginmanager.get_plugins() if hasattr(one, "sendevent"))
    send = worker.sendevent

    def send_shown(name: str, **kwargs: Any) -> None:
        of = kwargs.get("data", {})
        is_quiet = name == "testreport" and of["when"] != "call" and of["outcome"] == "passed"
        if name not in ("logstart", "logfinish") and not (is_quiet and of["duration"] < LONG_S):
            send(name, **kwargs)

    worker.sendevent = send_shown


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays, and the garbage collector need not walk through it during the tests.

    What the tests keep is much, too: with Python's thresholds a tenth of their time went into walking through it.
    """
    if session.config.option.collectonly:
        return
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 20)
    if hasattr(session.config, "workerinput"):
        # A test that thaws all it finds, or an engine that ends in this process, would leave the imported objects to be
        # walked through, and copied from the process that this one was forked off, by all later collections.
        gc.unfreeze = lambda: None  # type: ignore[assignment]
    if "accounting.store_schema" in sys.modules:
        from tests import recorded_tables

        recorded_tables.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the fast tests, neither the file of a slow one nor a folder without any other is imported."""
    if not config.getoption("--fast"):
        return None
    tests = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return True if all(is_slow_file(file) for file in tests if file.name.startswith("test_")) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if guard := item.config.stash.get(FAST, None):
        guard.tried.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    guard = item.config.stash.get(FAST, None)
    if guard is not None and guard.tried:
        pytest.fail(
            f"a fast test started something: {', '.join(guard.tried)}. Mark it with pytest.mark.slow."
        )
    return result


def _try_few_examples(items: list[pytest.Item]) -> None:
    """The whole suite looks for what few examples do not show."""
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if isinstance(given := getattr(item.cls, "settings", None), settings):
            item.cls.settings = settings(given, max_examples=min(given.max_examples, FAST_EXAMPLES))
        elif is_hypothesis_test(item.function):
            test = getattr(item.function, "__func__", item.function)
            given = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
            few = settings(given, max_examples=min(given.max_examples, FAST_EXAMPLES))
            test._hypothesis_internal_use_settings = few


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """For several processes: tests that share servers stay together, and long ones begin.

    Those of a file are a group unless they name another one.
    """
    if config.getoption("--fast"):
        slow = [item for item in items if is_slow_test(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
        _try_few_examples(items)
        return (yield)
    if not getattr(config.option, "loadgroup", False):
        return (yield)  # one process, or tests dealt out in another way on purpose
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}.{item.path.stem}"))
    yield
    folders = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: folders.get(item.path.parent.name, len(LONG)))
    if not all("@" in item.nodeid for item in items):
        raise pytest.UsageError(
            f"pytest {pytest.__version__} and this pytest-xdist do not keep the tests of a group together: "
            "install those that pyproject.toml names"
        )


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where backends under test keep their files."""
    return tmp_path_factory.mktemp("conformance")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running_vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningVllm]:
    """One vLLM in process for the whole session; to start one takes half a minute."""
    from tests.conformance.harness import in_one_task
    from tests.conformance.vllm_in_process import vllm_in_process

    async with in_one_task(vllm_in_process(tmp_path_factory.mktemp("vllm-adapters"))) as running:
        yield running


@pytest.fixture(scope="session")
def vllm(running_vllm: RunningVllm) -> Specimen:
    """It, for tests that only send requests."""
    return running_vllm.specimen


@pytest.fixture(scope="session")
def vllm_server(workshop: Path) -> Iterator[str]:
    """One `vllm serve` for all tests that only ask it, however prompts are sent to it."""
    from tests.conformance.specimens import vllm_serve

    with vllm_serve(workshop) as url:
        yield url
