"""Operators change the routing of several processes that share a state store; here it is in memory."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
import structlog
from pydantic import TypeAdapter

from gateway.admin.routing import (
    RevisionMadeBody,
    RouteApplyBody,
    RoutePromoteBody,
    RouteRollbackBody,
    RouteWeightBody,
    RoutingAdmin,
)
from gateway.errors import BackendUnavailable, InvalidRequest, RevisionConflict, UnknownRoute
from gateway.http.admin.routing import Configuration
from gateway.routing.change import ConfigChange
from gateway.routing.check import KnownNames
from gateway.routing.projection import STREAM, RoutingProjection, Seed
from gateway.routing.revision import RoutingFileError
from gateway.state import stream_follower
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.port import MAX_RECORD_BYTES
from gateway.state.projection import ProjectionState
from gateway.state.stream_follower import StreamFollower

ME = "key_1"


def config(local: float = 100, pool: float = 0, **more: Any) -> dict[str, Any]:
    backends = [{"name": "local", "weight": local}, {"name": "pool", "weight": pool}]
    return {"routes": {"chat": {"backends": backends, **more}}}


@dataclass
class Process:
    """One gateway process: its routing projection and its admin service."""

    streams: MemoryStreams
    known: KnownNames = field(default_factory=lambda: KnownNames({"local", "pool"}, {"v1"}, {"style"}))
    seed: Seed = field(default_factory=lambda: Seed("routing.yaml", config()))
    store_type: type[MemoryStateStore] = MemoryStateStore

    def __post_init__(self) -> None:
        seconds = itertools.count(1.0)
        self.store = self.store_type(self.streams, unix_time=lambda: next(seconds), poll_s=0.02)
        self.projection = RoutingProjection(
            self.store, known=self.known, seed=self.seed, unix_time=lambda: next(seconds)
        )
        self.follower = StreamFollower(
            self.store,
            STREAM,
            self.projection.take,
            copy=None,
            clock=asyncio.get_event_loop().time,
            prepare=self.projection.prepare,
        )
        self.projection.follow(self.follower)
        self.admin = RoutingAdmin(self.projection, Audit(self.store, unix_time=lambda: next(seconds)))

    async def apply(self, config: dict[str, Any], *, who: str = ME, **more: Any) -> RevisionMadeBody:
        return await self.admin.apply(RouteApplyBody(config=config, **more), who=who)

    async def set_weight(
        self, route: str, backend: str, percent: float, *, who: str = ME, **more: Any
    ) -> RevisionMadeBody:
        given = RouteWeightBody(route=route, backend=backend, percent=percent, **more)
        return await self.admin.set_weight(given, who=who)

    async def promote(self, route: str, backend: str, **more: Any) -> RevisionMadeBody:
        return await self.admin.promote(RoutePromoteBody(route=route, backend=backend, **more), who=ME)

    async def roll_back(self, to: int | None, *, who: str = ME, **more: Any) -> RevisionMadeBody:
        return await self.admin.roll_back(RouteRollbackBody(to=to, **more), who=who)

    def weights(self) -> dict[str, float]:
        return dict(self.projection.current().routes["chat"].weights)


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    """Run the processes' loops as ``gateway.wiring.build`` does."""
    async with asyncio.TaskGroup() as loops:
        tasks = []
        for one in processes:
            await one.store.open()
            await one.follower.start(30.0)  # until all is read, also on a busy machine
            tasks += [loops.create_task(one.store.run()), loops.create_task(one.follower.run())]
            await one.projection.start()
            tasks.append(loops.create_task(one.projection.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - nothing tells of it but a look
            await asyncio.sleep(0.01)


async def test_the_file_seeds_revision_1_once_and_is_not_used_afterwards() -> None:
    streams = MemoryStreams()
    first = Process(streams)
    second = Process(streams, seed=Seed("other.yaml", config(50, 50)))
    async with running(first, second):
        assert first.projection.number == second.projection.number == 1
        assert second.weights() == {"local": 100, "pool": 0}
    assert len(streams.records[STREAM]) == 1
    wrong = Process(streams, seed=Seed("routing.yaml", None, RoutingFileError("routing.yaml: wrong")))
    with structlog.testing.capture_logs() as logs:
        async with running(wrong):
            assert wrong.projection.number == 1, "a wrong file that is not used stops nobody"
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["reason"] == "routing.yaml: wrong"


async def test_a_changed_file_that_is_not_in_force_is_a_warning_with_the_difference_and_the_command() -> None:
    streams = MemoryStreams()
    async with running(Process(streams, seed=Seed("routing.yaml", config(), file="/etc/routing.yaml"))) as _:
        pass
    changed = Seed("routing.yaml", config(90, 10), file="/etc/routing.yaml")
    one = Process(streams, seed=changed)
    with structlog.testing.capture_logs() as logs:
        async with running(one):
            [change] = [one for one in one.projection.pending if "pool" in one.path]
    assert (change.path, change.before, change.after) == ("routes.chat.backends[pool].weight", 0.0, 10.0)
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["apply"] == "sluice routes apply /etc/routing.yaml"
    assert any("pool" in line and "10" in line for line in warning["changes"])


async def test_every_gateway_validates_a_change_once_and_in_a_thread_so_that_many_routes_hold_nothing_up() -> (
    None
):
    asked: list[int] = []

    class Backends(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            asked.append(threading.get_ident())
            return super().__contains__(name)

    streams, known = MemoryStreams(), KnownNames(Backends({"local", "pool"}), (), ())
    one, other = Process(streams, known=known), Process(streams, known=known)
    async with running(one, other):
        asked.clear()
        await one.apply(config(90, 10))
        await until(lambda: other.projection.number == 2)
        assert one.weights() == other.weights() == {"local": 90, "pool": 10}
    assert len(asked) == 4, "in each gateway once for each of the two backends"
    assert threading.get_ident() not in asked


async def test_configurations_are_compared_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def whole(given: Any) -> Any:
        compared.append(threading.get_ident())
        return given

    one = Process(MemoryStreams())
    async with running(one):
        monkeypatch.setattr("gateway.routing.change.whole", whole)
        await one.apply(config(90, 10))
        await one.apply(config(90, 10), dry_run=True)
        await one.roll_back(None)
        await one.admin.diff(1, 2)
    assert compared and threading.get_ident() not in compared


async def test_an_unchanged_file_is_no_warning_after_the_weights_were_changed_by_command() -> None:
    streams, seed = MemoryStreams(), Seed("routing.yaml", config(), file="routing.yaml")
    one = Process(streams, seed=seed)
    async with running(one):
        await one.promote("chat", "pool")
    again = Process(streams, seed=seed)
    with structlog.testing.capture_logs() as logs:
        async with running(again):
            assert again.projection.pending == ()
    assert [line for line in logs if line["log_level"] == "warning"] == []


async def test_a_change_that_changes_nothing_makes_no_revision() -> None:
    one = Process(MemoryStreams())
    async with running(one):
        await one.promote("chat", "pool")
        for made in (await one.promote("chat", "pool"), await one.apply(one.projection.last().draft.config)):
            assert (made["revision"], made["changes"]) == (2, [])
        assert one.projection.head == 2


async def test_a_comment_and_a_rollback_make_a_revision_though_the_configuration_stays_the_same() -> None:
    one = Process(MemoryStreams())
    async with running(one):
        made = await one.apply(one.projection.last().draft.config, comment="reviewed")
        assert (made["revision"], made["comment"], made["changes"]) == (2, "reviewed", [])
        back = await one.roll_back(2)
        assert (back["revision"], back["comment"]) == (3, "rollback to revision 2")


async def test_a_wrong_file_stops_the_first_start() -> None:
    wrong = Process(MemoryStreams(), seed=Seed("routing.yaml", None, RoutingFileError("routing.yaml: wrong")))
    with pytest.raises(ExceptionGroup) as caught:
        async with running(wrong):
            raise AssertionError("it started")
    assert [str(error) for error in caught.value.exceptions] == ["routing.yaml: wrong"]


async def test_without_a_store_the_file_serves_as_number_0_and_becomes_revision_1_later() -> None:
    streams = MemoryStreams()
    streams.down = True
    process = Process(streams)
    async with running(process):
        assert process.projection.number == 0 and process.weights()["local"] == 100
        with pytest.raises(
            BackendUnavailable, match=r"served as before; the change may or may not have been made"
        ):
            await process.apply(config(50, 50))
        with pytest.raises(BackendUnavailable, match=r"served as before$"):
            await process.admin.history(5)
        streams.down = False
        await until(lambda: process.projection.number == 1)


async def test_a_change_that_a_full_or_read_only_store_refused_is_answered_as_not_made() -> None:
    streams = MemoryStreams()
    async with running(process := Process(streams)):
        streams.full = True
        with pytest.raises(BackendUnavailable, match=r"served as before; nothing was changed$"):
            await process.apply(config(50, 50))


async def test_a_store_that_stays_away_at_the_start_is_logged_once_and_not_at_every_try() -> None:
    tries = 0

    class CountingStore(MemoryStateStore):
        async def append(self, *record: Any, **more: Any) -> Any:
            nonlocal tries
            tries += 1
            return await super().append(*record, **more)

    streams = MemoryStreams()
    streams.down = True
    with structlog.testing.capture_logs() as logs:
        async with running(Process(streams, store_type=CountingStore)):
            await until(lambda: tries == 3)
    assert [line["event"] for line in logs].count("the first routing revision is not written yet") == 1


async def test_each_change_is_a_revision_in_force_in_every_process() -> None:
    one, other = Process(streams := MemoryStreams()), Process(streams)
    async with running(one, other):
        made = await one.apply(config(90, 10), who="key_1", comment="a try")
        assert (made["revision"], made["parent"], made["author"], made["comment"]) == (2, 1, "key_1", "a try")
        assert made["changes"] == [
            ConfigChange("routes.chat.backends[local].weight", 100.0, 90.0),
            ConfigChange("routes.chat.backends[pool].weight", 0.0, 10.0),
        ]
        assert one.projection.number == 2, "in force when the call returns"
        await until(lambda: other.projection.number == 2)
        await other.set_weight("chat", "pool", 25)
        assert other.weights() == {"local": 75, "pool": 25}
        await one.promote("chat", "pool")
        assert one.weights() == {"local": 0, "pool": 100}
        shown = one.admin.show()
        assert (shown["revision"], shown["behind"]) == (4, None)
        assert [entry["revision"] for entry in await one.admin.history(3)] == [4, 3, 2]
        assert await one.admin.diff(1, 4) == [
            ConfigChange("routes.chat.backends[local].weight", 100.0, 0.0),
            ConfigChange("routes.chat.backends[pool].weight", 0.0, 100.0),
        ]


async def test_a_number_or_a_switch_that_the_file_has_as_text_is_stored_as_what_it_means() -> None:
    process = Process(MemoryStreams())
    async with running(process):
        given = config(slo={"ttft_ms": "300"}, requires_evaluation="no")
        given["routes"]["chat"]["backends"] = [
            {"name": "local", "weight": "90"},
            {"name": "pool", "weight": 10},
        ]
        made = await process.apply(given)
        backends = [{"name": "local", "weight": 90.0}, {"name": "pool", "weight": 10.0}]
        meant = {"backends": backends, "slo": {"ttft_ms": 300.0}, "requires_evaluation": False}
        assert process.admin.show()["config"] == made["config"] == {"routes": {"chat": meant}}


async def test_rollback_goes_to_the_last_other_content_or_to_the_named_revision() -> None:
    process = Process(MemoryStreams())
    async with running(process):
        await process.apply(config(90, 10))
        await process.apply(config(50, 50))
        await process.apply(config(50, 50), who="key_1", comment="changes nothing")
        back = await process.roll_back(None, who="key_2", comment="too slow")
        assert process.weights() == {"local": 90, "pool": 10}
        assert (back["revision"], back["comment"]) == (5, "rollback to revision 2: too slow")
        await process.roll_back(1)
        assert process.weights() == {"local": 100, "pool": 0}
        with pytest.raises(InvalidRequest, match="no revision 99; allowed: 1 to 6"):
            await process.roll_back(99)


async def test_rollback_with_nothing_else_before_is_refused() -> None:
    process = Process(MemoryStreams())
    async with running(process):
        await process.apply(config())
        with pytest.raises(InvalidRequest, match="no earlier revision"):
            await process.roll_back(None)


async def test_of_two_changes_that_expect_the_same_revision_the_second_is_refused() -> None:
    one, other = Process(streams := MemoryStreams()), Process(streams)
    async with running(one, other):
        await one.apply(config(90, 10), who="key_1", expected_revision=1)
        with pytest.raises(RevisionConflict, match="revision 2 is the last one, not 1"):
            await other.apply(config(80, 20), who="key_2", expected_revision=1)
        assert len(streams.records[STREAM]) == 2


async def test_a_change_waits_for_a_revision_that_another_process_just_made() -> None:
    one, other = Process(streams := MemoryStreams()), Process(streams)
    async with running(one, other):
        await one.apply(config(90, 10))
        made = await other.apply(config(80, 20), who="key_2", expected_revision=2)
        assert made["revision"] == 3
        back = await one.roll_back(None)
        assert (back["revision"], back["comment"]) == (4, "rollback to revision 2")
        assert (await other.admin.diff(1, 4))[0].after == 90


async def test_one_of_two_rollbacks_at_the_same_moment_is_a_conflict_and_does_not_undo_the_other() -> None:
    one, other = Process(streams := MemoryStreams()), Process(streams)
    async with running(one, other):
        await one.apply(config(90, 10))
        made = await asyncio.gather(one.roll_back(None), other.roll_back(None), return_exceptions=True)
        assert sorted(isinstance(each, RevisionConflict) for each in made) == [False, True]
        await until(lambda: one.projection.number == other.projection.number == 3)
        assert one.weights() == other.weights() == {"local": 100, "pool": 0}


@pytest.mark.parametrize(
    ("expected", "param", "message"),
    [
        (None, None, "another change came first;"),
        (2, "expected_revision", "revision 3 is the last one, not 2;"),
    ],
)
async def test_a_conflict_names_the_expected_revision_only_if_the_operator_gave_one(
    expected: int | None, param: str | None, message: str
) -> None:
    process = Process(MemoryStreams())
    async with running(process):
        await process.apply(config(90, 10))
        body = RouteRollbackBody(expected_revision=expected)
        both = (process.admin.roll_back(body, who=ME) for _ in range(2))
        _, refused = sorted(await asyncio.gather(*both, return_exceptions=True), key=_is_error)
        assert isinstance(refused, RevisionConflict)
        assert refused.param == param and str(refused).startswith(message)


def _is_error(made: object) -> bool:
    return isinstance(made, BaseException)


async def test_a_removed_adapter_does_not_block_weight_changes_but_cannot_be_named_again() -> None:
    adapters = {"style"}
    process = Process(MemoryStreams(), KnownNames({"local", "pool"}, {"v1"}, adapters))
    rules = [{"when": {"locale": "ja"}, "adapter": "style"}]
    async with running(process):
        await process.apply(config(100, 0, adapter_rules=rules))
        adapters.clear()
        await process.set_weight("chat", "pool", 5)
        assert process.weights() == {"local": 95, "pool": 5}
        await process.apply(config(50, 50))
        with pytest.raises(InvalidRequest, match=r"adapter_rules\[0\]\.adapter: unknown 'style'"):
            await process.roll_back(None)


async def test_changes_that_expect_no_revision_are_all_applied_in_turn() -> None:
    processes = [Process(streams := MemoryStreams()), Process(streams), Process(streams)]
    async with running(*processes):
        async with asyncio.TaskGroup() as group:
            for number, process in enumerate(processes):
                group.create_task(process.set_weight("chat", "pool", 10 * (number + 1)))
        assert len(streams.records[STREAM]) == 4
        await until(lambda: all(one.projection.number == 4 for one in processes))
        assert len({one.weights()["pool"] for one in processes}) == 1


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (config(90, 5), "add up to 95"),
        (config(fallback=["mars"]), r"config: routes.chat.fallback\[0\]: unknown 'mars'"),
        (config(prompt_version="v9"), "routes.chat.prompt_version: unknown 'v9'; allowed: v1"),
        (config(adapter_rules=[{"when": {}, "adapter": "x"}]), r"adapter_rules\[0\].adapter: unknown 'x'"),
    ],
)
async def test_a_faulty_configuration_never_becomes_a_revision(bad: dict[str, Any], shown: str) -> None:
    process = Process(streams := MemoryStreams())
    async with running(process):
        with pytest.raises(InvalidRequest, match=shown):
            await process.apply(bad)
        assert len(streams.records[STREAM]) == 1


async def test_an_unknown_route_is_told() -> None:
    process = Process(MemoryStreams())
    async with running(process):
        with pytest.raises(UnknownRoute, match="'talk' is not configured; known: chat"):
            await process.promote("talk", "pool")


async def test_an_unknown_backend_is_refused_by_the_field_that_names_it() -> None:
    process = Process(MemoryStreams())
    async with running(process):
        for change in (process.promote("chat", "mars"), process.set_weight("chat", "mars", 5)):
            with pytest.raises(InvalidRequest, match=r"^backend is 'mars'; allowed: local, pool$") as refused:
                await change
            assert refused.value.param == "backend"


async def test_a_dry_run_validates_and_changes_nothing() -> None:
    process = Process(streams := MemoryStreams())
    async with running(process):
        seen = await process.promote("chat", "pool", dry_run=True)
        assert (seen["dry_run"], seen["revision"], len(seen["changes"])) == (True, None, 2)
        with pytest.raises(InvalidRequest):
            await process.apply(config(1, 1), dry_run=True)
        assert len(streams.records[STREAM]) == 1 and "audit" not in streams.records


async def test_every_change_and_every_refusal_is_in_the_audit_log() -> None:
    process = Process(MemoryStreams())
    async with running(process):
        await process.set_weight("chat", "pool", 5, who="key_7", comment="first step")
        with pytest.raises(InvalidRequest):
            await process.apply(config(1, 1))
        with pytest.raises(InvalidRequest):
            await process.roll_back(40)
        entries = await process.admin.audit(10)
    assert [(e["who"], e["action"], e["target"], e["comment"]) for e in entries] == [
        ("key_1", "routing.rollback", "to revision 40", ""),
        ("key_1", "routing.apply", "routing", ""),
        ("key_7", "routing.weights", "chat: pool at 5 %", "first step"),
    ]
    assert [str(e["result"]).split(":")[0] for e in entries] == ["refused", "refused", "revision 2"]


async def test_a_process_that_cannot_use_a_revision_keeps_the_last_good_one_and_says_so() -> None:
    streams = MemoryStreams()
    whole, small = Process(streams), Process(streams, KnownNames({"local"}, {"v1"}, ()), Seed("s", None))
    async with running(whole):
        await whole.apply({"routes": {"chat": {"backends": [{"name": "local"}]}}})
        async with running(small):
            await whole.apply(config(50, 50))
            await until(lambda: small.projection.head == 3)
            shown = small.admin.show()
            assert shown["revision"] == 2 and small.weights() == {"local": 100}
            assert shown["behind"] is not None
            assert shown["behind"].revision == 3 and "'pool'" in shown["behind"].reason
            await small.roll_back(2)
            assert small.admin.show()["revision"] == 4 and small.admin.show()["behind"] is None


async def test_a_start_puts_the_last_usable_one_of_many_revisions_in_force() -> None:
    streams = MemoryStreams()
    whole, small = Process(streams), Process(streams, KnownNames({"local"}, {"v1"}, ()), Seed("s", None))
    async with running(whole):
        for number in range(2, 10):
            only_local = {"routes": {"chat": {"backends": [{"name": "local"}], "slo": {"ttft_ms": number}}}}
            await whole.apply(only_local if number < 8 else config(number, 100 - number))
        async with running(small):
            shown = small.admin.show()
            assert (shown["revision"], small.projection.head) == (7, 9)
            assert shown["behind"] is not None and shown["behind"].revision == 9
            assert small.projection.last().number == 9, "the base of the next change"


async def test_a_start_logs_the_revision_in_force_and_none_of_the_past() -> None:
    streams = MemoryStreams()
    whole, small = Process(streams), Process(streams, KnownNames({"local"}, {"v1"}, ()), Seed("s", None))
    async with running(whole):
        await whole.apply({"routes": {"chat": {"backends": [{"name": "local"}]}}})
        await whole.apply(config(50, 50))
        await whole.apply(config(60, 40))
        with structlog.testing.capture_logs() as logs:
            await small.store.open()
            await small.follower.start(30.0)  # until all is read, also on a busy machine
            await small.projection.start()
    found = [(line["log_level"], line["revision"]) for line in logs if "routing revision" in line["event"]]
    assert found == [("info", 2), ("error", 4)]


async def test_a_store_that_has_lost_revisions_takes_no_change_and_says_so() -> None:
    streams = MemoryStreams()
    one = Process(streams)
    async with running(one):
        await one.apply(config(90, 10))
        streams.records[STREAM].clear()
        with pytest.raises(BackendUnavailable, match="it has lost records; number 2 is in force here"):
            await one.apply(config(50, 50))
        assert one.weights() == {"local": 90.0, "pool": 10.0}
        await until(lambda: one.projection.followed.state is ProjectionState.LOST)
        for to in (None, 1):
            with pytest.raises(BackendUnavailable, match="it has lost records; number 2 is in force here"):
                await one.roll_back(to)
        assert not streams.records[STREAM]


async def test_a_store_with_another_last_revision_takes_no_change_of_the_one_in_force_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_follower, "VERIFY_S", 0.1)
    streams = MemoryStreams()
    one = Process(streams)
    async with running(one):
        await one.apply(config(90, 10))
        streams.records[STREAM][-1] = replace(streams.records[STREAM][-1], author="another")
        await until(lambda: one.projection.followed.state is ProjectionState.LOST)
        with pytest.raises(BackendUnavailable, match="it has lost records; number 2 is in force here"):
            await one.apply(config(50, 50))
        assert len(streams.records[STREAM]) == 2


def test_a_configuration_that_the_state_store_takes_may_have_any_number_of_fields() -> None:
    routes = {f"r{number}": config()["routes"]["chat"] for number in range(10_000)}
    body = orjson.dumps({"config": {"routes": routes}})
    adapter = TypeAdapter[RouteApplyBody](Configuration)
    assert len(adapter.validate_python(body).config["routes"]) == 10_000
    with pytest.raises(InvalidRequest, match=r"has 60002 fields; allowed: 50000 or fewer"):
        adapter.validate_python(body + b" " * MAX_RECORD_BYTES)
