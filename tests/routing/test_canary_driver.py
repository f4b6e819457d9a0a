"""A canary in several processes: all count, one judges, and the routing follows; the store is in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from adapters.changes import NotEvaluatedError
from gateway.admin.canary import CanaryAbortBody, CanaryAdmin, CanaryBody, CanaryStartBody
from gateway.admin.routing import RouteApplyBody, RouteRollbackBody, RouteWeightBody, RoutingAdmin
from gateway.errors import BackendUnavailable, InvalidRequest, RevisionConflict, UnknownRoute
from gateway.routing.canary import Phase, end
from gateway.routing.canary_loop import FORGET_EVERY, CanaryDriver
from gateway.routing.canary_records import SAMPLES, STREAM
from gateway.routing.canary_tally import CanaryTally
from gateway.routing.change import ConfigChange
from gateway.routing.check import KnownNames
from gateway.routing.projection import STREAM as ROUTING
from gateway.routing.projection import RoutingProjection, Seed
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.state.port import MAX_RECORD_BYTES
from gateway.state.projection import LatestRecord
from gateway.state.stream_follower import StreamFollower
from observability.events import RequestRecord

CONFIG: dict[str, Any] = {"routes": {"chat": {"backends": [{"name": "old", "weight": 100}]}}}
ME = "key_1"
ORDER = CanaryStartBody(
    route="chat",
    backend="new",
    comment="a try",
    steps=(5.0, 50.0, 100.0),
    min_samples=100,
    step_seconds=60.0,
    window_seconds=5.0,
)


class Time:
    """A Unix clock in seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Process:
    """The parts of one gateway process that a canary needs."""

    streams: MemoryStreams
    time: Time
    name: str
    models_of: dict[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = MemoryStateStore(self.streams, unix_time=self.time, poll_s=0.02)
        known = KnownNames({"old", "new", "other"}, set(), set())
        self.projection = RoutingProjection(
            self.store, known=known, seed=Seed("routing.yaml", CONFIG), unix_time=self.time
        )
        audit = Audit(self.store, unix_time=self.time)
        routes = self.projection.current
        self.tally = CanaryTally(lambda name: routes().routes.get(name), self.time, self.models_of)
        self.driver = CanaryDriver(
            self.store, self.projection, audit, self.tally, me=self.name, unix_time=self.time
        )
        clock = asyncio.get_event_loop().time
        routing = StreamFollower(self.store, ROUTING, self.projection.take, copy=None, clock=clock)
        standings = LatestRecord(self.store, STREAM, self.driver.take)
        self.followers = (routing, standings)
        self.projection.follow(routing)
        self.driver.follow(standings)
        ids = itertools.count(1)
        self.admin = CanaryAdmin(
            self.driver,
            self.projection,
            self.store,
            audit,
            new_id=lambda: f"canary_{next(ids)}",
            unix_time=self.time,
            evaluation_fault=lambda backend: f"{backend} was never evaluated",
        )
        self.routing = RoutingAdmin(self.projection, audit)

    @property
    def share(self) -> float:
        return dict(self.projection.current().routes["chat"].weights).get("new", 0.0)

    def serve(self, backend: str, requests: int, failed: int = 0, session: int | None = None) -> None:
        for number in range(requests):
            bad = number < failed
            self.tally.observe(
                RequestRecord(
                    "r", "g", "t", "tenant", "native", 503 if bad else 200, 100.0, route="chat", ttft_ms=50.0,
                    backend_name=None if bad else backend, drawn=backend, error_code="x" if bad else None,
                    session=session,
                )
            )  # fmt: skip


@asynccontextmanager
async def processes(count: int = 2) -> AsyncIterator[list[Process]]:
    streams, time = MemoryStreams(), Time()
    found = [Process(streams, time, f"proc_{number}") for number in range(count)]
    async with asyncio.TaskGroup() as loops:
        tasks = []
        for one in found:
            for follower in one.followers:
                await follower.start(0.1)
            tasks += [loops.create_task(one.store.run())]
            tasks += [loops.create_task(follower.run()) for follower in one.followers]
            await one.projection.start()
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - nothing tells of it but a look
            await asyncio.sleep(0.005)


async def window(found: list[Process], *, seconds: float = 5.0) -> None:
    """End a window: each process publishes its counts, then each driver ticks, the last process first."""
    await until(lambda: len({one.driver.head for one in found}) == 1)
    found[0].time.now += seconds
    for one in found:
        await one.driver.publish_counts()
    for one in reversed(found):
        await one.driver.tick()
    await until(lambda: len({(one.driver.head, one.projection.head) for one in found}) == 1)


async def test_a_good_canary_reaches_100_percent_by_the_counts_of_all_processes() -> None:
    async with processes() as found:
        one, other = found
        shown = await one.admin.start(ORDER, who=ME)
        assert one.share == 5.0 and shown["canary"]["percent"] == 5.0  # type: ignore[index]
        await until(lambda: other.driver.state is not None)
        for share in (50.0, 100.0):
            for process in found:
                process.serve("new", 50)
                process.serve("old", 60)
            await window(found, seconds=60.0)
            assert one.share == other.share == share
        canary: Any = other.admin.show()["canary"]
        assert (canary["phase"], canary["canary_requests"]) == ("done", 200)
        done = [entry["action"] for entry in await one.routing.audit(10)]
        assert done == ["canary.done", "canary.step", "canary.step", "canary.start", *done[4:]]


async def test_a_dry_run_validates_and_tells_the_changes_and_makes_none() -> None:
    async with processes() as found:
        one, _ = found
        shown: Any = await one.admin.start(ORDER.model_copy(update={"dry_run": True}), who=ME)
        assert shown["dry_run"] and shown["canary"]["backend"] == "new"
        [added] = [one for one in shown["changes"] if one.path == "routes.chat.backends[new]"]
        assert added.before is None and added.after["weight"] == 5.0
        with pytest.raises(InvalidRequest, match="backend is 'mars'; allowed: "):
            await one.admin.start(ORDER.model_copy(update={"backend": "mars", "dry_run": True}), who=ME)
        with pytest.raises(RevisionConflict, match="no canary to abort"):
            await one.admin.abort(CanaryAbortBody(comment="", dry_run=True), who=ME)
        assert one.driver.state is None and one.share == 0.0
        await one.admin.start(ORDER, who=ME)
        back: Any = await one.admin.abort(CanaryAbortBody(comment="why", dry_run=True), who=ME)
        assert ConfigChange("routes.chat.backends[new].weight", 5.0, 0.0) in back["changes"]
        assert one.share == 5.0 and one.driver.state is not None and not one.driver.state.ended
        assert [entry["action"] for entry in await one.routing.audit(9)] == ["canary.step", "canary.start"]


async def test_samples_that_were_read_are_removed_and_still_count() -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.state is not None)
        for _ in range(FORGET_EVERY):
            await one.store.append(SAMPLES, b"{}", author="another canary's")
        for _ in range(2):
            for process in found:
                process.serve("new", 50)
                process.serve("old", 60)
            await window(found, seconds=60.0)
        assert one.share == other.share == 100.0
        assert len(one.streams.records[SAMPLES]) < FORGET_EVERY
        assert (await one.store.heads())[SAMPLES] > FORGET_EVERY


@pytest.mark.parametrize("end", ["done", "aborted", "overridden"])
async def test_an_ended_canary_leaves_one_state_record_and_no_sample(end: str) -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.state is not None)
        for _ in range(2 if end == "done" else 1):
            for process in found:
                process.serve("new", 50)
                process.serve("old", 60)
            await window(found, seconds=60.0)
        if end == "aborted":
            await one.admin.abort(CanaryAbortBody(comment="why"), who=ME)
        elif end == "overridden":
            await one.routing.set_weight(
                RouteWeightBody(route="chat", backend="new", percent=33), who="key_1"
            )
            await window(found)
        await until(lambda: len({process.driver.head for process in found}) == 1)
        for process in found:
            assert process.driver.state is not None and process.driver.state.phase.value == end
            assert process.driver.state.applied
        [kept] = one.streams.records[STREAM]
        assert kept.number == one.driver.head == (await one.store.heads())[STREAM]
        assert one.streams.records[SAMPLES] == []
        await one.admin.start(ORDER.model_copy(update={"backend": "other"}), who=ME)
        await until(lambda: other.driver.head == one.driver.head > kept.number)


async def test_a_bad_canary_is_rolled_back_with_its_reason_in_comment_and_audit_log() -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.state is not None)
        one.serve("new", 8, failed=8)
        other.serve("new", 8, failed=8)
        for process in found:
            process.serve("old", 200, failed=1)
        await window(found)
        assert one.share == other.share == 0.0
        last = (await one.routing.history(1))[0]
        assert (last["author"], last["action"]) == ("canary", "canary")
        assert "rolled back: error: 16 of 16 requests against 2 of 400" in str(last["comment"])
        entry = (await one.routing.audit(1))[0]
        assert (entry["action"], entry["comment"]) == ("canary.rollback", last["comment"])
        canary: Any = other.admin.show()["canary"]
        assert (canary["phase"], canary["percent"]) == ("rolled_back", 0.0)


async def test_a_bad_canary_on_a_pool_of_several_models_is_rolled_back() -> None:
    async with processes(1) as found:
        one = found[0]
        one.models_of["new"] = ("new/a", "new/b")
        await one.admin.start(ORDER, who=ME)
        for model in ("a", "b"):
            one.serve(f"new/{model}", 8, failed=8)
        one.serve("old", 200, failed=1)
        await window(found)
        reason = one.admin.show()["canary"]["reason"]
        assert one.share == 0.0 and reason.startswith("error: 16 of 16 requests against 1 of 200")


async def test_when_the_driver_is_gone_another_goes_on_and_nothing_counts_twice() -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.state is not None)
        for _ in range(2):
            one.serve("new", 20)
            one.serve("old", 20)
            await window(found)
        assert other.driver.lease is not None and other.driver.lease.holder == "proc_0"
        for _ in range(4):
            await window([other])
        await until(lambda: one.driver.head == other.driver.head)
        assert other.driver.lease.holder == "proc_1"
        canary: Any = other.admin.show()["canary"]
        assert canary["canary_requests"] == 40


async def test_after_the_clock_was_set_back_by_hours_another_goes_on_as_soon_as_before() -> None:
    async with processes() as found:
        one, other = found
        one.time.now = other.time.now = one.time.now + 5 * 3600.0
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.state is not None)
        await window(found)
        one.time.now = other.time.now = one.time.now - 5 * 3600.0
        for _ in range(4):
            await window([other])
        assert other.driver.lease is not None and other.driver.lease.holder == "proc_1"


async def test_a_stored_verdict_that_was_not_applied_is_applied_by_the_next_process() -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.state is not None)
        await until(lambda: one.driver.head == other.driver.head)
        standing = other.driver.state
        assert standing is not None
        verdict = end(standing, Phase.ROLLED_BACK, "its writer died here", one.time())
        await other.driver.put(verdict, other.driver.head)
        assert one.share == 5.0
        await until(lambda: one.driver.head == other.driver.head)
        one.time.now += 60.0
        await one.driver.tick()
        assert one.share == 0.0


async def test_a_pause_at_another_process_is_kept_by_a_driver_that_judges_at_that_moment() -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: one.driver.head == other.driver.head)
        one.serve("new", 20)
        one.serve("old", 20)
        one.time.now += 5.0
        await one.driver.publish_counts()
        async with asyncio.TaskGroup() as group:
            group.create_task(one.driver.tick())
            await other.admin.pause(CanaryBody(comment="let me look"), who=ME)
        await until(lambda: one.driver.head == other.driver.head)
        canary: Any = one.admin.show()["canary"]
        assert (canary["phase"], canary["reason"]) == ("paused", "let me look")


async def test_an_abort_restores_the_weights_of_a_step_that_is_in_force_and_not_recorded() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        standing = one.driver.state
        assert standing is not None
        await one.driver.put(replace(standing, step=1, applied=False), one.driver.head)
        await one.routing.set_weight(RouteWeightBody(route="chat", backend="new", percent=50.0), who="canary")
        await one.admin.abort(CanaryAbortBody(comment="enough"), who=ME)
        canary: Any = one.admin.show()["canary"]
        assert (canary["phase"], one.share) == ("aborted", 0.0)


async def test_a_session_counts_once_in_a_window() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        for _ in range(2):
            one.serve("new", 30, failed=30, session=1)
            one.serve("old", 30)
            await window(found)
        canary: Any = one.admin.show()["canary"]
        assert (canary["canary_requests"], canary["phase"]) == (2, "running")
        error = canary["checks"]["error"]
        assert (error["canary_bad"], error["canary"], error["baseline_bad"]) == (2, 2, 0)
        assert error["canary_interval"] == pytest.approx((0.342, 1.0), abs=0.001)
        low, high = error["baseline_interval"]
        assert low == 0.0 < high < 0.2


@pytest.mark.parametrize("paused", [False, True])
async def test_what_an_operator_sets_by_hand_ends_the_canary_and_stays(paused: bool) -> None:
    async with processes() as found:
        one, _ = found
        await one.admin.start(ORDER, who=ME)
        if paused:
            await one.admin.pause(CanaryBody(), who=ME)
        await one.routing.set_weight(RouteWeightBody(route="chat", backend="new", percent=30.0), who="key_2")
        await window(found)
        canary: Any = one.admin.show()["canary"]
        assert (canary["phase"], canary["percent"], one.share) == ("overridden", 30.0, 30.0)
        await window(found)
        assert one.share == 30.0


async def test_a_canary_whose_routing_is_too_long_for_a_record_ends_with_that_as_its_reason() -> None:
    async with processes(1) as found:
        one = found[0]
        longest = MAX_RECORD_BYTES - 200  # a canary's step adds a backend and the weights without it
        config = {"routes": {"chat": {**CONFIG["routes"]["chat"], "degraded_text": "x" * longest}}}
        await one.routing.apply(RouteApplyBody(config=config), who=ME)
        canary: Any = (await one.admin.start(ORDER, who=ME))["canary"]
        assert (canary["phase"], one.share) == ("overridden", 0.0)
        assert "record of 10" in canary["reason"] and "somebody else" not in canary["reason"]


async def test_a_revision_of_the_canary_that_has_not_arrived_is_not_taken_for_an_override() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        standing = one.driver.state
        assert standing is not None
        to_come = {**standing.placed, "new": 50.0, "old": 50.0}
        ahead = replace(standing, step=1, placed=to_come, revision=one.projection.head + 1)
        await one.driver.put(ahead, one.driver.head)
        await window(found)
        assert one.driver.state == ahead


async def test_another_change_of_the_routing_is_kept_by_a_rollback() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        config = {**one.projection.last().draft.config, "openai_route": "chat"}
        await one.routing.apply(RouteApplyBody(config=config), who="key_2")
        await one.admin.abort(CanaryAbortBody(comment="enough"), who=ME)
        assert one.share == 0.0 and one.projection.last().draft.config["openai_route"] == "chat"
        canary: Any = one.admin.show()["canary"]
        assert (canary["phase"], canary["reason"]) == ("aborted", "enough")


async def test_a_rollback_after_an_abort_does_not_put_the_canary_back() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        config = {**one.projection.last().draft.config, "openai_route": "chat"}
        await one.routing.apply(RouteApplyBody(config=config), who="key_2")
        assert one.share == 5.0
        await one.admin.abort(CanaryAbortBody(comment="enough"), who=ME)
        assert one.share == 0.0 and one.projection.last().draft.config["openai_route"] == "chat"
        await one.routing.roll_back(RouteRollbackBody(), who="key_2")
        assert one.share == 0.0 and "openai_route" not in one.projection.last().draft.config


async def test_a_rollback_of_another_change_keeps_the_running_canary_and_its_share() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        config = {**one.projection.last().draft.config, "openai_route": "chat"}
        await one.routing.apply(RouteApplyBody(config=config), who="key_2")
        for share, opened in ((5.0, False), (5.0, True)):  # the second rollback undoes the first
            await one.routing.roll_back(RouteRollbackBody(), who="key_2")
            assert (one.share, "openai_route" in one.projection.last().draft.config) == (share, opened)
        one.serve("new", 100)
        one.serve("old", 100)
        await window(found, seconds=60.0)
        canary: Any = one.admin.show()["canary"]
        assert (canary["phase"], canary["step"]) == ("running", 2) and one.share > 5.0
        await one.routing.roll_back(RouteRollbackBody(), who="key_2")  # of the canary's own step
        assert one.share == 0.0 and "openai_route" in one.projection.last().draft.config


async def test_a_rollback_of_a_finished_canary_takes_all_of_it_back() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        for _ in range(2):
            one.serve("new", 100)
            one.serve("old", 100)
            await window(found, seconds=60.0)
        assert one.share == 100.0
        back = await one.routing.roll_back(RouteRollbackBody(comment="slow"), who="key_2")
        assert one.share == 0.0
        # Revision 3 gave the canary half of the route.
        assert back["comment"] == "rollback to revision 3, except the canary's weights: slow"


async def test_a_paused_canary_keeps_its_share_and_is_not_judged() -> None:
    async with processes() as found:
        one, other = found
        await one.admin.start(ORDER, who=ME)
        await until(lambda: other.driver.head == one.driver.head)
        await other.admin.pause(CanaryBody(comment="lunch"), who=ME)
        await until(lambda: other.driver.head == one.driver.head)
        one.serve("new", 50, failed=50)
        one.serve("old", 50)
        await window(found)
        assert one.share == 5.0
        await other.admin.resume(CanaryBody(comment=""), who=ME)
        await until(lambda: other.driver.head == one.driver.head)
        one.serve("new", 50, failed=50)
        one.serve("old", 50)
        await window(found)
        assert one.share == 0.0


async def test_what_is_not_allowed_is_refused_and_says_what_is() -> None:
    async with processes(1) as found:
        admin = found[0].admin
        with pytest.raises(RevisionConflict, match="no canary"):
            await admin.pause(CanaryBody(comment=""), who=ME)
        with pytest.raises(UnknownRoute):
            await admin.start(CanaryStartBody(route="mars", backend="new"), who=ME)
        with pytest.raises(InvalidRequest, match="backend is 'mars'; allowed: "):
            await admin.start(CanaryStartBody(route="chat", backend="mars"), who=ME)
        with pytest.raises(InvalidRequest, match="has 100 %"):
            await admin.start(CanaryStartBody(route="chat", backend="old"), who=ME)
        await admin.start(ORDER, who=ME)
        with pytest.raises(RevisionConflict, match="abort it"):
            await admin.start(ORDER, who=ME)
        with pytest.raises(RevisionConflict, match="running; allowed: a paused one"):
            await admin.resume(CanaryBody(comment=""), who=ME)
        results = [entry["result"] for entry in await found[0].routing.audit(1)]
        assert str(results[0]).startswith("refused: revision_conflict")


async def test_while_the_store_is_away_nothing_changes_and_it_goes_on_afterwards() -> None:
    async with processes(1) as found:
        one = found[0]
        await one.admin.start(ORDER, who=ME)
        one.streams.down = True
        with pytest.raises(BackendUnavailable):
            await one.admin.abort(CanaryAbortBody(comment=""), who=ME)
        one.serve("new", 30, failed=30)
        one.serve("old", 30)
        one.time.now += 5.0
        await one.driver.publish_counts()
        await one.driver.tick()
        assert one.share == 5.0
        one.streams.down = False
        one.serve("new", 30, failed=30)
        one.serve("old", 30)
        await window(found)
        assert one.share == 0.0
        assert (await one.store.heads())[SAMPLES] == 1


async def test_a_route_that_requires_an_evaluation_lets_no_canary_start_without_one_but_by_force() -> None:
    async with processes(1) as found:
        admin, routing = found[0].admin, found[0].routing
        required = {"routes": {"chat": {**CONFIG["routes"]["chat"], "requires_evaluation": True}}}
        await routing.apply(RouteApplyBody(config=required), who=ME)
        with pytest.raises(
            NotEvaluatedError, match="new was never evaluated; run `sluice evaluate variant --post`"
        ):
            await admin.start(ORDER, who=ME)
        await admin.start(ORDER.model_copy(update={"force": True}), who=ME)
        assert found[0].share == 5.0
        actions = [entry["action"] for entry in await routing.audit(10)]
        assert "canary.start.forced" in actions


async def test_a_command_to_a_canary_that_the_store_has_lost_says_so() -> None:
    async with processes(1) as [one]:
        await one.admin.start(ORDER, who=ME)
        one.streams.records[STREAM].clear()
        with pytest.raises(BackendUnavailable, match="it has lost records; number 2 is in force here"):
            await one.admin.abort(CanaryAbortBody(), who=ME)
        assert one.driver.state is not None and one.driver.state.phase is Phase.RUNNING
