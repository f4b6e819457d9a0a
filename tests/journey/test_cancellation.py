"""The caller disconnects at each await in turn; afterwards nothing of the request is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

import pytest

from adapters.values import Adapter
from budgeting.values import EvidenceChunk, Plan, SectionCounts
from gateway.backends.port import BackendState
from gateway.contracts.events import Delta
from gateway.contracts.values import GenerateRequest
from gateway.generation.answer_stream import AnswerOrigin, AnswerStream
from resilience.failures import BackendFailure, FailureKind
from resilience.time_limits import TimeLimit, TimeLimits
from tests.journey.rig import JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

# Far more turns of the event loop than any of these journeys takes.
MOST_TURNS = 400


async def cancel_at_every_turn(
    build: Callable[[], JourneyRig], request: GenerateRequest
) -> tuple[int, JourneyRig]:
    """Runs the journey repeatedly, cancelled one loop turn later each time; returns the turns it takes."""
    for turns in range(MOST_TURNS):
        rig = build()
        sink = RecordingSink()
        journey = asyncio.get_running_loop().create_task(rig.journey.run(request, sink))
        for _ in range(turns):
            await asyncio.sleep(0)
        finished = journey.done()
        journey.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await journey
        assert rig.in_use() == [], f"after {turns} turns"
        assert len(rig.outbox.rows) <= 1, f"billed twice after {turns} turns"
        assert len(rig.records) == (1 if turns else 0)
        delivered = sum(delta.tokens for delta in sink.deltas)
        for row in rig.outbox.rows:
            assert row.output_tokens >= delivered
            if not finished and sink.answer is None and row.finish_reason == "cancelled":
                assert row.output_tokens <= delivered + 1, "the piece on its way out counts, no other"
        if finished:
            return turns, rig
    pytest.fail(f"the journey took more than {MOST_TURNS} turns")


async def test_nothing_is_left_when_the_caller_leaves_a_plain_request_at_any_await(
    build_rig: Build, ask: Ask
) -> None:
    adapter = Adapter("jp_style_v1", 1, "scripted", "adapters/jp")
    request = ask(
        adapter_id="jp_style_v1", chunks=(EvidenceChunk("m1", "catalog", "Vinland Saga"),), stream=True
    )
    turns, rig = await cancel_at_every_turn(lambda: build_rig(adapters=[adapter]), request)
    assert turns > 5
    assert rig.outbox.rows[0].finish_reason == "stop"


async def test_nothing_is_left_when_the_caller_leaves_during_a_retry(build_rig: Build, ask: Ask) -> None:
    failing = BackendFailure(FailureKind.NAN_OUTPUT, "nan")
    turns, _ = await cancel_at_every_turn(
        lambda: build_rig(Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))),
        ask(stream=True),
    )
    assert turns > 2
    rig = build_rig(Script((), failure=failing), Script())
    journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(), RecordingSink()))
    await asyncio.sleep(0.02)
    assert not journey.done(), "it waits before the retry"
    journey.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await journey
    assert rig.in_use() == []
    assert rig.outbox.rows[0].finish_reason == "cancelled"


async def test_nothing_is_left_when_the_caller_leaves_during_a_fallback(build_rig: Build, ask: Ask) -> None:
    def build() -> JourneyRig:
        dead = ScriptedBackend("local", state=BackendState.DEAD)
        return build_rig(
            backends=[dead, ScriptedBackend("pool", scripts=[Script(("a", "b", "c"))])],
            route={"fallback": ["response_cache", "pool", "degraded"]},
        )

    turns, rig = await cancel_at_every_turn(build, ask(stream=True))
    assert turns > 3
    assert rig.outbox.rows[0].fallback == "pool"


async def test_nothing_is_left_when_the_caller_leaves_while_a_large_prompt_is_planned(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig()
    journey = asyncio.get_running_loop().create_task(
        rig.journey.run(ask("volume " * 3000, sampling=ask().sampling), RecordingSink())
    )
    await asyncio.sleep(0)
    journey.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await journey
    assert rig.in_use() == []
    assert rig.outbox.rows == []


@virtual_time
async def test_a_request_over_its_time_limit_ends_alike_for_the_caller_the_record_and_the_ledger(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("Hello",), delay_s=60.0))
    rig.journey = replace(rig.journey, time_limit=partial(TimeLimit, TimeLimits(), 0.05))
    sink = await rig.run(ask())
    assert sink.error is not None
    assert (sink.error.status, sink.error.code) == (504, "deadline_exceeded")
    (record,) = rig.records
    assert (record.status, record.error_code, record.finish_reason) == (504, "deadline_exceeded", "error")
    assert {row.error_code for row in rig.outbox.rows} <= {"deadline_exceeded"}
    assert rig.in_use() == []


@virtual_time
async def test_the_record_of_a_caller_who_left_has_the_tokens_of_its_usage_row(
    build_rig: Build, ask: Ask
) -> None:
    """Otherwise the metrics would count the cached tokens of a prompt and not the prompt."""
    rig, sink = build_rig(Script(("Hello", " there"), delay_s=0.05, cached_tokens=1)), RecordingSink()
    journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(stream=True), sink))
    while not sink.deltas:
        done, _ = await asyncio.wait({journey}, timeout=0.001)
        assert not done
    journey.cancel()
    await asyncio.gather(journey, return_exceptions=True)
    (record,), (row,) = rig.records, rig.outbox.rows
    assert (record.error_code, record.input_tokens > 0) == ("cancelled", True)
    assert (record.input_tokens, record.output_tokens) == (row.input_tokens, row.output_tokens)


async def test_a_caller_who_leaves_before_the_time_limit_is_reported_as_gone(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("Hello",), delay_s=60.0))
    rig.journey = replace(rig.journey, time_limit=partial(TimeLimit, TimeLimits(), 60.0))
    journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(), RecordingSink()))
    for _ in range(50):
        await asyncio.sleep(0)
    journey.cancel()
    with pytest.raises(asyncio.CancelledError):
        await journey
    (record,) = rig.records
    assert (record.status, record.error_code) == (499, "cancelled")


async def test_a_caller_who_leaves_between_its_answer_and_its_record_was_answered(
    build_rig: Build, ask: Ask
) -> None:
    """Under load the records of several answers are made together, in the turn after the answers."""
    rig, sinks = build_rig(), [RecordingSink(), RecordingSink()]
    journeys = [
        asyncio.get_running_loop().create_task(
            rig.journey.run(ask(request_id=f"req_{number}", generation_id=f"gen_{number}"), sink)
        )
        for number, sink in enumerate(sinks)
    ]
    for _ in range(MOST_TURNS):
        if sinks[0].answer:
            break
        await asyncio.sleep(0)
    assert not journeys[0].done()
    journeys[0].cancel()
    await asyncio.gather(*journeys, return_exceptions=True)
    assert journeys[0].cancelled()
    assert [(record.status, record.error_code) for record in rig.records] == [(200, None), (200, None)]
    assert [row.finish_reason for row in rig.outbox.rows] == ["stop", "stop"]


@pytest.mark.parametrize("discarded", [False, True])
async def test_a_partial_answer_is_billed_unless_its_sink_has_discarded_it(
    build_rig: Build, ask: Ask, discarded: bool
) -> None:
    rig, sink = build_rig(), RecordingSink()
    journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(stream=True), sink))
    while not sink.deltas:  # noqa: ASYNC110
        await asyncio.sleep(0)
    sink.discarded = discarded
    journey.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await journey
    [row] = rig.outbox.rows
    assert row.finish_reason == "cancelled" and row.output_tokens
    assert bool(row.billable_output_tokens) is not discarded


class GivesUpAtTheEnd(RecordingSink):
    """The sink of a response that another gateway has taken since the last delta."""

    async def delta(self, delta: Delta) -> None:
        await super().delta(delta)
        task = asyncio.current_task()
        if self.text == "Hello there" and not delta.text and task is not None:
            self.discarded = True
            task.cancel()
            await asyncio.sleep(0)


async def test_a_first_piece_that_is_given_up_before_its_sending_begins_is_not_billed(ask: Ask) -> None:
    stream = AnswerStream(ask(stream=True), RecordingSink(), lambda: 0.0)
    plan = Plan((), (), SectionCounts(), 8, 0)
    stream.started(AnswerOrigin("local", "scripted", "scripted", plan, 8), lambda cached: None)
    sending = stream.take(Delta("Hello", 1))
    assert isinstance(sending, Coroutine) and not stream.delivered
    sending.close()
    assert not stream.delivered


async def test_an_answer_that_its_sink_gives_up_after_the_last_delta_is_not_billed(
    build_rig: Build, ask: Ask
) -> None:
    rig, sink = build_rig(Script(("Hello", " there"))), GivesUpAtTheEnd()
    journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(stream=True), sink))
    with pytest.raises(asyncio.CancelledError):
        await journey
    [row] = rig.outbox.rows
    assert sink.answer is None
    assert (row.finish_reason, row.output_tokens, row.billable_output_tokens) == ("cancelled", 2, 0)
