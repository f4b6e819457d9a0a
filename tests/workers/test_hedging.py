"""A late request is also sent to a second worker: one stream is delivered and billed, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.backends.port import Completion, DeltaSink
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.hedging import MOST_SAVED, WINDOW_S, HedgePolicy, Run, race
from gateway.backends.workers.worker import WATCH_CONNECTIONS
from gateway.config.backends import HedgeSection
from gateway.contracts.events import Delta
from gateway.contracts.values import FinishReason, Usage
from gateway.wiring.backends import hedges
from observability.collectors import plain
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.workers.raw_worker import (
    STREAM_HEAD,
    Behaviour,
    RawWorker,
    Request,
    answers,
    chunk,
    piece,
    pool,
    refuses,
    sends,
    until,
    work,
)

HEDGE = {"enabled": True, "min_ms": 40, "max_share": 0.5}
SILENT = sends(then="hold")


@asynccontextmanager
async def warmed(
    *workers: RawWorker, rounds: int = 2, hedge: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[WorkersBackend]:
    """Run a pool that has measured the time to the first token: each worker has answered ``rounds`` requests.

    No request counts as late before all have answered, so none of these requests is hedged.
    """
    asks = rounds * len(workers)
    if hedge is None:
        hedge = {**HEDGE, "quantile": 1 - 1 / (asks - 0.5)}
    async with pool(*workers, **{"hedge": hedge, "affinity": False, **changes}) as backend:
        for _ in range(asks):
            await collect(backend, work())
        yield backend


def quick_then(*behaviours: Any) -> RawWorker:
    return RawWorker([answers("quick"), answers("quick"), *behaviours])


def after(event: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    """A behaviour that waits for ``event`` and then acts like ``behaviour``."""

    async def behave(request: Request) -> None:
        await event.wait()
        await behaviour(request)

    return behave


def tells(event: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    """A behaviour that sets ``event`` and then acts like ``behaviour``."""

    async def behave(request: Request) -> None:
        event.set()
        await behaviour(request)

    return behave


async def test_a_late_request_is_answered_by_a_second_worker_and_the_first_is_cancelled() -> None:
    slow, quick = quick_then(SILENT), quick_then(answers("Hello", " there", prompt=5, cached=3))
    async with warmed(slow, quick) as backend:
        answer = await collect(backend, work())
        assert answer.text == "Hello there"
        assert answer.completion.usage == Usage(5, 2, 3)
        assert backend.hedging is not None
        assert (backend.hedging.sent, backend.hedging.won) == (1, 1)
        await until(lambda: slow.connections <= WATCH_CONNECTIONS)
    assert len(slow.requests) == len(quick.requests) == 3


async def test_the_first_worker_wins_when_it_speaks_before_the_second_one() -> None:
    asked = asyncio.Event()
    slow, quick = quick_then(after(asked, answers("mine"))), quick_then(tells(asked, SILENT))
    async with warmed(slow, quick) as backend:
        assert (await collect(backend, work())).text == "mine"
        assert backend.hedging is not None
        assert (backend.hedging.sent, backend.hedging.won) == (1, 0)
        await until(lambda: quick.connections <= WATCH_CONNECTIONS)


async def test_a_request_that_is_in_time_is_asked_once() -> None:
    workers = [RawWorker([answers("a", "b")]) for _ in range(2)]
    async with warmed(*workers, hedge={**HEDGE, "quantile": 0.5, "min_ms": 60_000}) as backend:
        for _ in range(10):
            await collect(backend, work())
        assert backend.hedging is not None and backend.hedging.sent == 0
    assert sum(len(worker.requests) for worker in workers) == 14


async def test_without_hedging_no_request_is_sent_twice() -> None:
    slow, quick = quick_then(answers("late", delay_s=0.3)), quick_then(answers("quick"))
    async with warmed(slow, quick, hedge={}) as backend:
        assert backend.hedging is None
        assert (await collect(backend, work())).text == "late"
    assert len(quick.requests) == 2


async def test_the_extra_requests_stay_under_their_share() -> None:
    asks = 0

    async def late(request: Request) -> None:
        await until(lambda: known() == asks)  # its hedge was sent or refused
        await answers("late")(request)

    def known() -> int:
        assert backend.hedging is not None
        return backend.hedging.sent + backend.hedging.refused

    workers = [RawWorker([*[answers("quick")] * 10, late]) for _ in range(2)]
    hedge = {**HEDGE, "quantile": 1 - 1 / 19.5, "max_share": 0.1}
    async with warmed(*workers, rounds=10, hedge=hedge) as backend:
        for _ in range(10):
            asks += 1
            await collect(backend, work())
        assert backend.hedging is not None
        assert 1 <= backend.hedging.sent <= 3 and backend.hedging.refused >= 1
        # A hedge that lost before its request was sent is counted, but reached no worker.
        assert 0 <= sum(len(worker.requests) for worker in workers) - (20 + 10) <= backend.hedging.sent


async def test_a_first_worker_that_fails_while_the_second_is_asked_does_no_harm() -> None:
    asked, failed = asyncio.Event(), asyncio.Event()

    async def fails(request: Request) -> None:
        await asked.wait()
        await refuses(500)(request)
        failed.set()

    first, second = quick_then(fails), quick_then(tells(asked, after(failed, answers("saved", delay_s=0.2))))
    async with warmed(first, second) as backend:
        assert (await collect(backend, work())).text == "saved"


async def test_when_both_fail_the_next_worker_is_tried() -> None:
    asked = asyncio.Event()
    fails = refuses(500)
    workers = [
        quick_then(after(asked, fails)),
        quick_then(tells(asked, fails)),
        quick_then(answers("third")),
    ]
    async with warmed(*workers, max_attempts=3) as backend:
        assert (await collect(backend, work())).text == "third"


async def test_a_winning_stream_that_breaks_off_is_not_replaced_by_another() -> None:
    slow, broken = quick_then(SILENT), quick_then(sends(STREAM_HEAD, chunk(piece("half")), then="reset"))
    async with warmed(slow, broken) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.STREAM_BROKEN


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.06, 0.1])
async def test_a_caller_that_leaves_ends_both(after_s: float) -> None:
    held: list[Request] = []

    async def holds(request: Request) -> None:
        held.append(request)
        await request.reader.read()
        held.remove(request)
        request.close()

    workers = [quick_then(holds), quick_then(holds)]
    async with warmed(*workers) as backend:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await collect(backend, work())
        await until(lambda: not held)


async def test_the_counts_are_metrics() -> None:
    async with warmed(quick_then(SILENT), quick_then(answers("x"))) as backend:
        await collect(backend, work())
        registry = CollectorRegistry()
        registry.register(plain("sluice_hedged_requests", lambda: hedges([backend])))
        shown = generate_latest(registry).decode()
    assert 'sluice_hedged_requests_total{backend="worker",result="won"} 1.0' in shown
    assert 'sluice_hedged_requests_total{backend="worker",result="lost"} 0.0' in shown


class Steps:
    """Two runs of a race; each takes one step when a test releases its turn."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.turn = [asyncio.Semaphore(0), asyncio.Semaphore(0)]
        self.open = 0

    def run(self, number: int, pieces: int, fails: bool) -> Run:
        async def go(push: DeltaSink) -> Completion:
            self.open += 1
            try:
                for _ in range(pieces):
                    await self.turn[number].acquire()
                    await push(Delta(str(number), 1))
                await self.turn[number].acquire()
                if fails:
                    raise BackendFailure(FailureKind.STREAM_BROKEN, str(number))
                return Completion(FinishReason.STOP, Usage(1, pieces, 0))
            finally:
                self.open -= 1

        return go


@given(
    pieces=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    fails=st.tuples(st.booleans(), st.booleans()),
    turns=st.lists(st.integers(0, 1), max_size=12),
    leaves_after=st.none() | st.integers(0, 12),
)
def test_exactly_one_stream_reaches_the_sink_and_its_tokens_alone_are_billed(
    pieces: tuple[int, int], fails: tuple[bool, bool], turns: list[int], leaves_after: int | None
) -> None:
    async def scenario() -> None:
        steps, answer = Steps(), []

        async def out(delta: Delta) -> None:
            answer.append(delta.text)

        runs = [steps.run(number, pieces[number], fails[number]) for number in (0, 1)]
        policy = HedgePolicy(HedgeSection())
        outcome: Completion | BackendFailure | None = None

        async def caller() -> None:
            nonlocal outcome
            try:
                outcome = await race(
                    runs[0], lambda: runs[1], out, late_after_s=0.0, policy=policy, clock=lambda: 0.0
                )
            except BackendFailure as failure:
                outcome = failure

        async with asyncio.TaskGroup() as group:
            task = group.create_task(caller())
            for _ in range(10):
                await asyncio.sleep(0)
            for number, turn in enumerate([*turns, *[0] * 6, *[1] * 6]):
                if number == leaves_after:
                    task.cancel()
                    break
                steps.turn[turn].release()
                for _ in range(6):
                    await asyncio.sleep(0)
        assert steps.open == 0, "nothing of either runs on"
        assert len(set(answer)) <= 1, "never both"
        if isinstance(outcome, Completion):
            assert len(answer) == outcome.usage.output_tokens
        elif leaves_after is None:
            assert isinstance(outcome, BackendFailure) and any(fails)
            if answer:
                assert str(outcome) == answer[0], "the failure of the one that was heard"

    asyncio.run(scenario())


@given(
    share=st.floats(0.01, 0.5),
    asks=st.lists(st.booleans(), max_size=300),
)
def test_never_more_extra_requests_than_the_share_allows(share: float, asks: list[bool]) -> None:
    policy = HedgePolicy(HedgeSection(max_share=share))
    for number, late in enumerate(asks, start=1):
        policy.record_request()
        if late:
            policy.grant()
        assert policy.sent <= share * number + 1e-9
    assert policy.sent <= share * len(asks) + MOST_SAVED


def test_late_is_what_is_later_than_the_quantile_of_the_last_minutes() -> None:
    policy = HedgePolicy(HedgeSection(quantile=0.9, min_ms=10))
    for _ in range(9):
        policy.record_first_token(0.1, 0.0)
    assert policy.late_after_s(0.0) is None, "nine say nothing of one in ten"
    for _ in range(100):
        policy.record_first_token(0.1, 1.0)
    found = policy.late_after_s(1.0)
    assert found is not None and 0.1 <= found <= 0.111
    for _ in range(200):
        policy.record_first_token(0.5, WINDOW_S + 2.0)
    found = policy.late_after_s(WINDOW_S + 2.0)
    assert found is not None and 0.5 <= found <= 0.555, "it follows the load"
    assert policy.late_after_s(4 * WINDOW_S) is None, "what is old counts no more"


def test_nothing_is_late_before_the_least_time() -> None:
    policy = HedgePolicy(HedgeSection(quantile=0.5, min_ms=50))
    for _ in range(10):
        policy.record_first_token(0.002, 0.0)
    assert policy.late_after_s(0.0) == 0.05
