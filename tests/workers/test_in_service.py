"""A pool without workers in service: it notices at once, and is ready with the first worker that answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.backends.port import Absence, BackendState, Restarting
from gateway.backends.workers.backend import RETRY_S
from gateway.backends.workers.in_service import MAX_PROBES, OUTAGE_PROBE_S, WorkersInService
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.state.servers import free_port
from tests.workers.raw_worker import (
    STREAM_HEAD,
    RawWorker,
    Request,
    answers,
    chunk,
    piece,
    pool,
    refuses,
    state_of,
    until,
    work,
)

GOOD = answers("Hello", " there")
# So long that no worker is probed again or returns from ejection during a test.
PATIENT: dict[str, Any] = {"probe_interval_seconds": 60.0, "eject_seconds": 60.0, "eject_max_seconds": 60.0}


def outage(in_service: WorkersInService) -> float | None:
    """The outage in seconds; a call, because the type checker takes a property for unchanged."""
    return in_service.outage_s


def dying(worker: RawWorker) -> None:
    """Make the worker die after the first piece of its next answer."""

    async def behave(request: Request) -> None:
        await request.send(STREAM_HEAD, chunk(piece("Hello")))
        await worker.die()

    worker.behaviours[:] = [behave]


async def test_a_worker_that_dies_under_a_stream_is_out_of_service_when_the_stream_fails() -> None:
    lost, other = RawWorker([GOOD]), RawWorker([GOOD])
    dying(lost)
    async with pool(lost, other, affinity=False, **PATIENT) as backend:
        failures = []
        for _ in range(2):  # equal workers take turns: one of the two requests goes to the dying one
            try:
                await collect(backend, work())
            except BackendFailure as error:
                failures.append(error)
                assert [one.state for one in state_of(backend)] == ["ejected", "in_service"]
        [failure] = failures
        assert failure.kind is FailureKind.STREAM_BROKEN and failure.isolated


async def test_the_last_workers_death_changes_the_pools_state_and_does_not_count_for_its_circuit() -> None:
    only = RawWorker([GOOD])
    dying(only)
    async with pool(only, **PATIENT) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.STREAM_BROKEN
        assert not caught.value.counts
        assert backend.state is BackendState.STARTING


async def test_an_ejected_worker_that_answers_its_probes_is_logged_as_detected_once() -> None:
    failing, other = RawWorker([refuses(500)]), RawWorker([GOOD])
    for worker in (failing, other):
        worker.models = lambda: b'{"data": [{"id": "base"}]}'
    with capture_logs() as logs:
        async with pool(failing, other, affinity=False, eject_seconds=60, eject_after_failures=1) as backend:
            for _ in range(2):  # equal workers take turns
                await collect(backend, work())
            assert "ejected" in [one.state for one in state_of(backend)]
            seen = failing.probes
            await until(lambda: failing.probes > seen + 5)
    assert [line["worker"] for line in logs].count(failing.url) > 1
    assert sum(line["event"] == "worker detected" for line in logs) == 2


async def test_a_pool_out_of_service_says_what_its_workers_do() -> None:
    lost, other = RawWorker([GOOD]), RawWorker([GOOD])
    async with pool(lost, other, **PATIENT) as backend:
        for worker in (lost, other):
            await worker.die()
        with pytest.raises(BackendFailure, match="the worker refuses connections"):
            await collect(backend, work())
        assert backend.state is BackendState.STARTING
        reason = f"none of the 2 workers of {backend.name} is in service: refuses connections (2)"
        assert backend.absence == Absence(reason, retry_s=RETRY_S)
    only = RawWorker([GOOD])
    async with pool(only, **PATIENT) as backend:
        await only.die()
        with pytest.raises(BackendFailure):
            await collect(backend, work())
        assert backend.absence == Absence(f"worker {backend.name} refuses connections", retry_s=RETRY_S)


async def test_a_worker_that_does_not_answer_from_the_start_on_is_logged_once() -> None:
    gone, other = RawWorker([GOOD]), RawWorker([GOOD])
    await gone.start()
    await gone.die()
    await other.start()
    with capture_logs() as logs:
        async with pool(gone, other, started=False) as backend:
            worker = backend._workers[gone.url]
            for _ in range(5):
                probed = worker._probed
                await until(probed.is_set)
    named = [(line["event"], line["reason"]) for line in logs if line.get("worker") == gone.url]
    assert named == [("worker not in service", "refuses connections")]


async def test_a_restarted_worker_is_not_said_to_have_failed_requests() -> None:
    lost, other = RawWorker([GOOD]), RawWorker([GOOD])
    async with pool(lost, other, eject_seconds=60, eject_max_seconds=60) as backend:
        worker = backend._workers[lost.url]
        await lost.die()
        await until(lambda: worker.unavailable_reason == "refuses connections")
        await lost.start()
        await until(lambda: worker.unavailable_reason == "was out of service and is coming back")


async def test_a_worker_that_still_listens_stays_in_service_after_one_broken_stream() -> None:
    only = RawWorker([GOOD])

    async def cut(request: Request) -> None:
        await request.send(STREAM_HEAD, chunk(piece("Hello")))
        request.reset()

    only.behaviours[:] = [cut, GOOD]
    async with pool(only, **PATIENT) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.counts
        assert backend.state is BackendState.READY
        assert (await collect(backend, work())).text == "Hello there"


async def test_waiting_requests_go_on_with_the_first_worker_that_answers_again() -> None:
    one, two = RawWorker([GOOD]), RawWorker([GOOD])
    async with pool(one, two, **PATIENT) as backend:
        waiting: Restarting = backend  # the protocol by which the fallback chain waits
        assert waiting.ready_in_s is None
        await one.die()
        await two.die()
        for _ in range(2):
            with pytest.raises(BackendFailure):
                await collect(backend, work())
        assert backend.state is BackendState.STARTING
        assert (backend.ready_in_s or 0.0) >= OUTAGE_PROBE_S
        assert not await backend.wait_ready(0.01)
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(backend.wait_ready(60.0)) for _ in range(3)]
            await asyncio.sleep(0)
            await two.start()  # ejected for another minute, but it is the only one that answers
        assert all(wait.result() for wait in waits)
        assert backend.ready_in_s is None
        assert (await collect(backend, work())).text == "Hello there"
        assert [status.state for status in state_of(backend)] == ["ejected", "in_service"]


async def test_a_pool_that_never_had_a_worker_does_not_estimate_when_it_is_ready() -> None:
    worker = RawWorker([GOOD], port=free_port())  # on which it never listens
    async with pool(worker, started=False) as backend:
        assert backend.ready_in_s is None
        assert not await backend.wait_ready(0.01)
    assert not await backend.wait_ready(60.0)  # a stopped pool answers at once


async def test_an_outage_is_taken_to_last_as_long_as_it_has_lasted() -> None:
    now, probed = [100.0], []
    in_service = WorkersInService(lambda: now[0])
    for url in ("a", "b"):
        in_service.join_pool(url, lambda url=url: probed.append(url))  # type: ignore[misc]
    assert not in_service.serving and outage(in_service) is None
    in_service.add("a")
    in_service.add("b")
    in_service.remove("a")
    assert outage(in_service) is None and not probed
    in_service.remove("b")
    assert outage(in_service) == 0.0
    assert probed == ["a", "b"], "the last one's leaving makes all be probed"
    now[0] += 3.0
    in_service.remove("b")  # its ejection is extended
    assert outage(in_service) == 3.0 and probed == ["a", "b"]
    in_service.add("a")
    assert outage(in_service) is None


def test_all_workers_of_a_large_pool_together_are_probed_a_bounded_number_of_times_a_second() -> None:
    in_service = WorkersInService(lambda: 0.0)
    for number in range(1_000):
        in_service.join_pool(str(number), lambda: None)
    assert 1_000 / in_service.outage_probe_s == MAX_PROBES


async def test_a_worker_whose_probes_fail_does_not_end_a_wait() -> None:
    worker = RawWorker([GOOD])
    async with pool(worker) as backend:
        worker.healthy = False
        await until(lambda: backend.state is BackendState.STARTING)
        assert not await backend.wait_ready(0.3)
        worker.healthy = True
        assert await backend.wait_ready(30.0)


async def test_a_litellm_is_never_asked_for_its_health_which_sends_paid_requests() -> None:
    worker = RawWorker([answers("x")], liveliness=b'"I\'m alive!"')
    async with pool(worker):
        await asyncio.sleep(0.2)
        assert worker.probes == 0


async def test_a_server_that_answers_every_path_is_probed_by_its_health() -> None:
    worker = RawWorker([answers("x")], liveliness=b"<html>")
    async with pool(worker):
        await until(lambda: worker.probes > 1)
