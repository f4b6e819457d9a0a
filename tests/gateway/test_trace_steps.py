import asyncio

import pytest

from observability.trace_context import parse_traceparent
from observability.trace_steps import MAX_STEPS, TraceSteps
from observability.tracing import Tracing
from resilience.failures import BackendFailure, FailureKind


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_report_their_times_their_end_and_the_wait_between() -> None:
    clock = Clock()
    steps = TraceSteps(clock, 100.0)
    clock.now = 100.5
    with pytest.raises(BackendFailure), steps.step("attempt", "pool", 1):
        clock.now = 101.0
        raise BackendFailure(FailureKind.TIMEOUT, "late")
    clock.now = 101.25
    with steps.step("attempt", "pool", 2) as again:
        again.mode = "exact"
        clock.now = 102.0
    steps.refused("bedrock", "queue_full")
    first, second, refused = steps.up_to_now()
    assert (first.began_ms, first.took_ms, first.failure, first.waited_ms) == (500.0, 500.0, "timeout", None)
    assert (second.failure, second.mode, second.waited_ms) == (None, "exact", 250.0)
    assert (refused.name, refused.backend, refused.failure, refused.took_ms) == (
        "refused", "bedrock", "queue_full", 0.0,
    )  # fmt: skip


async def test_a_step_that_is_cancelled_says_so() -> None:
    steps = TraceSteps(Clock(), 100.0)

    async def step() -> None:
        with steps.step("attempt", "pool", 1):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(step())
        await asyncio.sleep(0)
        task.cancel()
    assert [fact.failure for fact in steps.up_to_now()] == ["cancelled"]


def test_a_call_takes_its_own_span_to_the_server_and_none_without_a_trace() -> None:
    with (
        TraceSteps(Clock(), 100.0).step("attempt", "pool", 1) as untraced,
        untraced.call("http://a:1/v1") as call,
    ):
        assert call.headers == b""
    root = Tracing().begin()
    steps = TraceSteps(Clock(), 100.0, root)
    with steps.step("attempt", "pool", 1) as step:
        step.call("http://a:1/v1")
        with step.call("http://b:2/v1", hedge=True) as call:
            header = call.headers.decode().removeprefix("traceparent: ").strip()
    parent = parse_traceparent(header)
    assert parent is not None
    (fact,) = steps.up_to_now()
    assert [one.hedge for one in fact.calls] == [False, True]
    assert parent.span_id == f"{root.child_id(fact.calls[1].number):016x}"


def test_the_number_of_steps_is_bounded() -> None:
    steps = TraceSteps(Clock(), 100.0)
    for _ in range(3 * MAX_STEPS):
        steps.refused("pool", "leg_limit")
    assert len(steps.up_to_now()) == MAX_STEPS
