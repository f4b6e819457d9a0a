"""A broken answer is resumed: the caller gets one unbroken stream and pays for each token once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from websockets.asyncio.client import connect as connect_socket

from admission.events import Admitted
from admission.values import AdmissionLimits, BackendLoad
from gateway.app import create_app
from gateway.backends.port import BackendState, Completion, Continue, DeltaSink, Work
from gateway.contracts.events import Delta, Reasoning
from gateway.contracts.values import (
    Contract,
    FinishReason,
    FormatType,
    GenerateRequest,
    ResponseFormat,
    Sampling,
)
from gateway.testing import CALLER_KEY, fake_services, serving
from resilience.events import Resumed
from resilience.failures import BackendFailure, CannotResume, FailureKind
from resilience.fallback_policy import MAX_RESUMES
from tests.journey.rig import JourneyRig, PieceTokenizer, RecordingSink, RestartingBackend
from tests.journey.test_cancellation import cancel_at_every_turn
from tests.scripted import Script, ScriptedBackend
from tests.sse import json_events
from tests.virtual_time import VirtualTimeLoop, loop_time, virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

# As in engines, some text comes late: the text of the third token comes with the fourth.
PIECES = ("Vin", "land", "", " Saga", ", of", " cour", "se", "。")
BYTES = ("Vin", "land", " Sa", "ga", ", of", " cour", "se", "。")
TEXT, IDS = "".join(PIECES), tuple(range(len(PIECES)))
SPELLING = PieceTokenizer(BYTES)
EXACT = frozenset({Continue.TOKENS})
WHOLE = Script(PIECES, token_ids=IDS)
GONE = BackendFailure(FailureKind.ENGINE_DEAD, "gone")
BROKEN = BackendFailure(FailureKind.STREAM_BROKEN, "cut")
HELD_BACK = {"resume": {"commit_chunks": 3}}


def breaking(after: int, failure: BackendFailure = BROKEN, script: Script = WHOLE) -> Script:
    return replace(script, failure=failure, breaks_after=after)


def backend(
    *scripts: Script, name: str = "local", continues: frozenset[Continue] = EXACT, **more: Any
) -> ScriptedBackend:
    return ScriptedBackend(name, scripts=scripts, continues=continues, **more)


def restarting(*scripts: Script, restart_s: float | None = 0.01, **more: Any) -> RestartingBackend:
    made = RestartingBackend("local", scripts=scripts, **{"continues": EXACT, **more})
    made.restart_s, made.waited_for = restart_s, asyncio.Event()
    return made


BROKEN_AT_ONCE = breaking(0)


def check_whole(rig: JourneyRig, sink: RecordingSink) -> None:
    """Checks that there is one answer and one row, with every token once."""
    answer = sink.answer
    assert answer is not None, sink.error
    assert answer.output_text == TEXT
    assert answer.usage.output_tokens == len(PIECES)
    assert answer.finish_reason is FinishReason.STOP
    [row] = rig.outbox.rows
    assert (row.output_tokens, row.input_tokens) == (len(PIECES), answer.usage.input_tokens)
    assert rig.in_use() == []


@pytest.mark.parametrize("k", range(len(PIECES) + 1))
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_breaks_after_any_token_goes_on_where_it_broke(
    build_rig: Build, ask: Ask, k: int, stream: bool
) -> None:
    rig = build_rig(
        backends=[backend(breaking(k), WHOLE), backend(WHOLE, name="other")],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=stream))
    check_whole(rig, sink)
    assert sink.answer is not None
    if stream:
        assert sink.text == TEXT
    else:
        assert sink.deltas == [], "nobody sees the pieces of an answer that is given whole"
    # Without a token there is nothing to resume: the next leg makes another attempt.
    assert sink.answer.backend_name == ("local" if k else "other")
    assert (sink.answer.fallback is None) == bool(k)


@pytest.mark.parametrize("k", range(1, len(PIECES) + 1))
@pytest.mark.parametrize("with_ids", [True, False], ids=["with ids", "without ids"])
@pytest.mark.parametrize("way", [Continue.TOKENS, Continue.TEXT])
async def test_another_backend_goes_on_when_the_first_cannot(
    build_rig: Build, ask: Ask, k: int, with_ids: bool, way: Continue
) -> None:
    script = WHOLE if with_ids else replace(WHOLE, token_ids=())
    rig = build_rig(
        backends=[
            backend(breaking(k, GONE, script), continues=frozenset()),
            backend(replace(script, token_ids=()), name="far", model="other", continues=frozenset({way})),
        ],
        route={"fallback": ["far", "degraded"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    answer = sink.answer
    assert answer is not None, sink.error
    assert answer.output_text == sink.text == TEXT
    assert (answer.backend_name, answer.fallback and answer.fallback.kind) == ("far", "far")
    assert answer.fallback is not None and answer.fallback.reason == "engine_dead"
    [event] = [event for event in rig.events if isinstance(event, Resumed)]
    mode = "text" if way is Continue.TEXT else "spelled"
    assert (event.source, event.target, event.mode, event.result) == ("local", "far", mode, "whole")
    [resumed] = rig.backends["far"].calls
    assert resumed.partial is None or resumed.partial.tokens == event.tokens > 0
    assert len(rig.outbox.rows) == 1
    assert rig.in_use() == []


@pytest.mark.parametrize("k", range(1, len(PIECES) + 1))
@pytest.mark.parametrize("way", [Continue.TOKENS, Continue.TEXT])
async def test_tokens_whose_text_was_held_back_are_counted_once_when_another_model_goes_on(
    build_rig: Build, ask: Ask, k: int, way: Continue
) -> None:
    # The second model shows each token's text at once.
    rig = build_rig(
        backends=[
            backend(breaking(k, GONE), continues=frozenset()),
            backend(Script(BYTES), name="far", model="other", continues=frozenset({way})),
        ],
        route={"fallback": ["far"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True, sampling=Sampling(max_tokens=20)))
    assert sink.answer is not None, sink.error
    assert sink.text == TEXT
    [row] = rig.outbox.rows
    assert (sink.answer.usage.output_tokens, row.output_tokens) == (len(BYTES), len(BYTES))
    rest = rig.backends["far"].calls[0].sampling.max_tokens
    assert rest == 20 - (2 if k == 3 else k)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_waits_for_its_engine_to_come_back(build_rig: Build, ask: Ask, stream: bool) -> None:
    rig = build_rig(backends=[restarting(breaking(3, GONE), WHOLE)], spelling=SPELLING)
    sink = await rig.run(ask(stream=stream))
    check_whole(rig, sink)
    assert sink.answer is not None and sink.answer.fallback is None
    first, second = rig.backends["local"].calls
    assert second.partial is not None and second.partial.token_ids == first.token_ids[:0] + IDS[:2]
    assert second.partial.text == "Vinland"
    assert second.token_ids == first.token_ids
    assert first.sampling.max_tokens is not None
    assert second.sampling.max_tokens == first.sampling.max_tokens - 2


@pytest.mark.parametrize(
    ("priority", "stream", "then"), [(-1, False, -1), (-1, True, 1), (0, False, 1), (0, True, 1)]
)
async def test_a_whole_answer_of_the_low_class_does_not_go_before_callers_when_its_engine_is_back(
    build_rig: Build, ask: Ask, priority: int, stream: bool, then: int
) -> None:
    rig = build_rig(backends=[restarting(breaking(3, GONE), WHOLE)], spelling=SPELLING)
    check_whole(rig, await rig.run(ask(priority=priority, stream=stream)))
    assert [one.priority for one in rig.admissions if isinstance(one, Admitted)] == [priority, then]


async def test_an_answer_that_was_not_begun_waits_too_and_is_not_degraded(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[restarting(breaking(0, GONE), WHOLE)], spelling=SPELLING)
    check_whole(rig, await rig.run(ask()))


@virtual_time
async def test_a_leg_that_is_ready_is_preferred_to_a_long_restart(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[restarting(breaking(2, GONE), WHOLE, restart_s=30), backend(WHOLE, name="other")],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    assert loop_time() < 1, "the restart takes half a minute"
    check_whole(rig, sink)
    assert sink.answer is not None and sink.answer.backend_name == "other"


@pytest.mark.parametrize("back", [True, False])
async def test_a_leg_that_refuses_to_resume_costs_nothing_and_leaves_the_exact_way_to_the_engine(
    build_rig: Build, ask: Ask, back: bool
) -> None:
    throttled = BackendFailure(FailureKind.THROTTLED, "busy")
    far = backend(breaking(0, throttled), name="far", model="other", continues=frozenset({Continue.TEXT}))
    local = restarting(breaking(3, GONE), WHOLE, restart_s=0.01 if back else None)
    rig = build_rig(
        backends=[local, far], route={"fallback": ["far"], "resume": {"wait_ms": 0}}, spelling=SPELLING
    )
    sink = await rig.run(ask(stream=True))
    assert len(far.calls) == 1
    [row] = rig.outbox.rows
    assert (row.backend_name, row.model) == ("local", local.model)
    if back:
        check_whole(rig, sink)
        assert [event.mode for event in rig.events if isinstance(event, Resumed)] == ["text", "exact"]


async def test_a_short_restart_is_preferred_to_a_leg(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[restarting(breaking(2, GONE), WHOLE), backend(WHOLE, name="other")],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is not None and sink.answer.backend_name == "local"


async def test_a_new_request_does_not_wait_for_a_long_restart(build_rig: Build, ask: Ask) -> None:
    away = restarting(WHOLE, restart_s=30, state=BackendState.STARTING)
    away.ready_in_s = 30.0
    answer = (await build_rig(backends=[away], spelling=SPELLING).run(ask())).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"


async def test_a_new_request_waits_for_a_short_restart(build_rig: Build, ask: Ask) -> None:
    away = restarting(WHOLE, state=BackendState.STARTING)
    away.ready_in_s = 0.01
    answer = (await build_rig(backends=[away], spelling=SPELLING).run(ask())).answer
    assert answer is not None and (answer.output_text, answer.fallback) == (TEXT, None)


async def test_an_engine_that_never_comes_back_leaves_a_part_or_the_degraded_text(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[restarting(breaking(4, GONE), restart_s=None)], spelling=SPELLING)
    sink = await rig.run(ask(stream=True))
    assert sink.answer is None and sink.error is not None
    assert sink.error.code == "backend_unavailable"
    assert sink.text == "Vinland Saga"
    [row] = rig.outbox.rows
    assert (row.output_tokens, row.finish_reason) == (4, "error")
    answer = (await rig.run(ask(generation_id="gen_2"))).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED


async def test_a_resumed_answer_that_breaks_is_resumed_again(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[
            backend(breaking(2), breaking(2), BROKEN_AT_ONCE),
            backend(breaking(1), WHOLE, name="other"),
        ],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    check_whole(rig, sink)
    assert (rig.records[0].seams or ())[0].tokens == 2
    assert [resume.target for resume in (rig.records[0].seams or ())] == ["local", "local", "other", "other"]


async def test_when_both_legs_break_the_caller_keeps_a_part_and_pays_for_it(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(
        backends=[
            backend(breaking(2), BROKEN_AT_ONCE),
            backend(breaking(2), BROKEN_AT_ONCE, name="other"),
        ],
        route={"fallback": ["other", "degraded"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is None and sink.error is not None
    assert sink.text == "Vinland Saga"
    [row] = rig.outbox.rows
    assert (row.output_tokens, row.error_code) == (4, "backend_unavailable")
    assert rig.in_use() == []


@pytest.mark.parametrize("where", ["the primary", "another backend"])
async def test_the_error_behind_a_part_of_an_answer_says_what_broke_it(
    build_rig: Build, ask: Ask, where: str
) -> None:
    scripts = breaking(2, BackendFailure(FailureKind.TIMEOUT, "nothing more came")), BROKEN_AT_ONCE
    away = BackendFailure(FailureKind.BACKEND_UNAVAILABLE, "no worker is in service")
    if where == "the primary":
        local = restarting(*scripts, restart_s=0.01, state=BackendState.STARTING)
        local.ready_in_s = 0.01
        rig = build_rig(backends=[local], route={"fallback": []}, spelling=SPELLING)
    else:
        backends = [backend(breaking(0, away)), backend(*scripts, name="other")]
        rig = build_rig(backends=backends, route={"fallback": ["other"]}, spelling=SPELLING)
    sink = await rig.run(ask(stream=True))
    assert sink.text == "Vinland" and sink.error is not None
    assert sink.error.message == "timeout: nothing more came"
    assert rig.outbox.rows[0].output_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("found", [0, 2, None], ids=["cold", "warm", "not reported"])
@pytest.mark.parametrize("breaks", [1, 2])
async def test_a_resumed_answer_does_not_count_its_own_prompt_as_cached_tokens(
    build_rig: Build, ask: Ask, found: int | None, breaks: int, stream: bool
) -> None:
    again = replace(WHOLE, cached_tokens=3, cached_at_end=found is None)
    first = breaking(2, script=replace(again, cached_tokens=found or 0))
    second = again if breaks == 1 else breaking(1, script=again)
    rig = build_rig(
        backends=[backend(first, second), backend(again, name="other")],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=stream))
    check_whole(rig, sink)
    assert sink.answer is not None and sink.answer.usage.cached_tokens == (found or 0)
    [row], [record] = rig.outbox.rows, rig.records
    assert row.cached_tokens == record.cached_tokens == (found or 0)


class WritingBackend(ScriptedBackend):
    """Reports its whole prompt as written to its cache, as Bedrock does for a new prefix."""

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        completion = await super().generate(work, out)
        usage = structs.replace(completion.usage, cache_write_tokens=completion.usage.input_tokens)
        return structs.replace(completion, usage=usage)


async def test_cached_tokens_and_those_written_by_the_resuming_call_are_at_most_the_prompt(
    build_rig: Build, ask: Ask
) -> None:
    first = backend(breaking(2, GONE, replace(WHOLE, cached_tokens=3)), continues=frozenset())
    far = WritingBackend("far", scripts=[WHOLE], continues=EXACT)
    rig = build_rig(backends=[first, far], route={"fallback": ["far"]}, spelling=SPELLING)
    sink = await rig.run(ask(stream=True))
    check_whole(rig, sink)
    assert sink.answer is not None
    usage = sink.answer.usage
    assert (usage.cached_tokens, usage.cached_tokens + usage.cache_write_tokens) == (3, usage.input_tokens)


@pytest.mark.parametrize("cut_by", ["a break", "the deadline"])
@virtual_time
async def test_an_answer_that_ends_as_a_part_has_the_cached_tokens_of_its_first_call(
    build_rig: Build, ask: Ask, cut_by: str
) -> None:
    again = replace(WHOLE, cached_tokens=3)
    rest = breaking(1, script=again) if cut_by == "a break" else replace(again, delay_s=0.4)
    rig = build_rig(backends=[backend(breaking(2), rest)], spelling=SPELLING)
    await rig.run(ask(stream=True, deadline=loop_time() + 1.5))
    [row] = rig.outbox.rows
    assert (row.cached_tokens, 2 < row.output_tokens < len(PIECES)) == (0, True)


@pytest.mark.parametrize("cut_by", ["a break", "the deadline"])
@virtual_time
async def test_the_cached_tokens_of_a_part_are_at_most_the_prompt_of_the_call_that_resumed_it(
    build_rig: Build, ask: Ask, cut_by: str
) -> None:
    """The plan for another model may be shorter than the prompt that the first call found cached."""
    rest = breaking(1) if cut_by == "a break" else replace(WHOLE, delay_s=0.4)
    first = backend(breaking(2, GONE, replace(WHOLE, cached_tokens=1_000_000)), continues=frozenset())
    far = backend(rest, name="far")
    rig = build_rig(backends=[first, far], route={"fallback": ["far"]}, spelling=SPELLING)
    await rig.run(ask(stream=True, deadline=loop_time() + 1.5))
    [row], [record] = rig.outbox.rows, rig.records
    assert row.backend_name == "far" and len(record.seams or ()) > 0
    assert row.cached_tokens == row.input_tokens > 0
    assert record.cached_tokens == record.input_tokens


async def test_an_answer_that_is_made_again_has_the_cached_tokens_of_its_own_call(
    build_rig: Build, ask: Ask
) -> None:
    first, again = replace(WHOLE, cached_tokens=1), replace(WHOLE, cached_tokens=3)
    rig = build_rig(backends=[backend(breaking(2, script=first), again, continues=frozenset())])
    sink = await rig.run(ask())
    check_whole(rig, sink)
    assert sink.answer is not None and sink.answer.usage.cached_tokens == 3


async def test_the_number_of_resumes_is_bounded(build_rig: Build, ask: Ask) -> None:
    letters = Script(tuple("abcdefghij"), token_ids=tuple(range(10)))
    rig = build_rig(backends=[backend(breaking(1, script=letters))], spelling=PieceTokenizer("abcdefghij"))
    sink = await rig.run(ask(stream=True))
    assert sink.error is not None and sink.text == "abcdefghij"[: MAX_RESUMES + 1]
    assert len(rig.records[0].seams or ()) == MAX_RESUMES


async def test_a_caller_who_wants_errors_still_gets_the_rest_from_the_same_backend(
    build_rig: Build, ask: Ask
) -> None:
    legs = {"fallback": ["other", "degraded"]}
    local, other = backend(breaking(3), WHOLE), backend(WHOLE, name="other")
    rig = build_rig(backends=[local, other], route=legs, spelling=SPELLING)
    check_whole(rig, await rig.run(ask(stream=True, allow_fallback=False)))
    rig = build_rig(
        backends=[backend(breaking(3), continues=frozenset()), backend(WHOLE, name="other")],
        route={**legs},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True, allow_fallback=False))
    assert sink.error is not None and rig.backends["other"].calls == []


async def test_a_route_may_say_that_broken_streams_stay_broken(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[backend(breaking(5), WHOLE), backend(WHOLE, name="other")],
        route={"fallback": ["other"], "resume": {"enabled": False}},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    assert sink.error is not None and TEXT.startswith(sink.text) and sink.text


@pytest.mark.parametrize("sampling", [Sampling(n=2), Sampling()])
async def test_an_answer_that_cannot_be_resumed_ends_as_a_part(
    build_rig: Build, ask: Ask, sampling: Sampling
) -> None:
    shape = ResponseFormat(FormatType.JSON_OBJECT) if sampling.n == 1 else ResponseFormat()
    rig = build_rig(backends=[backend(breaking(4), WHOLE)], spelling=SPELLING)
    asked = ask(
        stream=True, contract=Contract.CHAT, model="scripted", sampling=sampling, response_format=shape
    )
    sink = await rig.run(asked)
    assert sink.error is not None and len(rig.backends["local"].calls) == 1


async def test_the_record_of_a_broken_answer_names_the_backend_of_its_bill(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[backend(breaking(4), continues=frozenset())], spelling=SPELLING)
    await rig.run(ask(stream=True))
    assert (rig.records[0].backend_name, rig.records[0].error_code) == ("local", "backend_unavailable")
    assert rig.outbox.rows[0].backend_name == "local"


async def test_no_request_waits_for_an_engine_that_could_not_resume_it(build_rig: Build, ask: Ask) -> None:
    engine = restarting(breaking(4, GONE), WHOLE, continues=frozenset())
    rig = build_rig(backends=[engine], spelling=SPELLING)
    sink = await rig.run(ask(stream=True))
    assert sink.error is not None and sink.text
    assert not engine.waited_for.is_set()


async def test_a_shaped_answer_goes_on_where_its_shape_survives(build_rig: Build, ask: Ask) -> None:
    able = EXACT | {Continue.SHAPED}
    rig = build_rig(backends=[backend(breaking(4), WHOLE, continues=able)], spelling=SPELLING)
    asked = ask(stream=True, response_format=ResponseFormat(FormatType.JSON_OBJECT))
    check_whole(rig, await rig.run(asked))


async def test_an_undelivered_broken_answer_is_generated_anew_rather_than_resumed_by_text(
    build_rig: Build, ask: Ask
) -> None:
    fresh = Script(("Quite", " another."), token_ids=(0, 1))
    rig = build_rig(
        backends=[
            backend(breaking(6, GONE), continues=frozenset()),
            backend(fresh, name="far", continues=frozenset({Continue.TEXT})),
        ],
        route={"fallback": ["far"]},
        spelling=SPELLING,
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.output_text == "Quite another."
    assert answer.usage.output_tokens == rig.outbox.rows[0].output_tokens == 2
    [work] = rig.backends["far"].calls
    assert work.partial is None


@pytest.mark.parametrize(
    ("differs", "refusals"),
    [(False, 0), (False, 1), (True, 0)],
    ids=["refuses the ids", "refuses", "repeats other words"],
)
async def test_a_whole_answer_that_a_backend_cannot_resume_is_made_anew_there_at_once(
    build_rig: Build, ask: Ask, differs: bool, refusals: int
) -> None:
    events = frozenset({Continue.EVENTS}) if differs else frozenset()
    fresh = Script(("Quite", " another."), token_ids=(0, 1))
    begun = breaking(6, GONE)
    if differs:
        fresh = Script(events=(Reasoning("Well.", 1), Delta("Quite another.", 1)), token_ids=(0, 1))
        begun = Script(
            events=(Reasoning("Hm.", 1), *fresh.events), token_ids=(0, 1), failure=GONE, breaks_after=1
        )
    refused = breaking(0, CannotResume("a strict tool's call"))
    far = backend(*[refused] * refusals, fresh, name="far", continues=EXACT | events)
    engine = restarting(begun, restart_s=None, continues=events)
    rig = build_rig(backends=[engine, far], route={"fallback": ["far"]}, spelling=SPELLING)
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.output_text == "Quite another."
    assert answer.usage.output_tokens == rig.outbox.rows[0].output_tokens == 2
    assert [work.partial is None for work in far.calls] == [False, True]
    assert not engine.waited_for.is_set()


@pytest.mark.parametrize(
    "asked",
    [
        {"sampling": Sampling(echo=True)},
        {"template_kwargs": {"add_generation_prompt": False}},
        {"reasoning_effort": "low"},
    ],
    ids=["echo", "own ending", "template's variable"],
)
async def test_a_whole_answer_that_no_worker_can_resume_is_made_again(
    build_rig: Build, ask: Ask, asked: dict[str, Any]
) -> None:
    pool = backend(breaking(3), WHOLE)
    rig = build_rig(backends=[pool], spelling=SPELLING)
    check_whole(rig, await rig.run(ask(**asked)))
    assert [work.partial for work in pool.calls] == [None, None]


@virtual_time
async def test_a_deadline_ends_the_wait_with_what_there_is(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[restarting(breaking(4, GONE), restart_s=30)], spelling=SPELLING)
    sink = await rig.run(ask(stream=True, deadline=loop_time() + 2.0))
    assert loop_time() < 3, "the restart takes half a minute"
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEADLINE
    assert sink.answer.output_text == sink.text == "Vinland Saga"
    assert sink.answer.usage.output_tokens == rig.outbox.rows[0].output_tokens == 4
    assert rig.in_use() == []


class LateBackend(ScriptedBackend):
    """Its first piece is received in the turn of the event loop in which the deadline passes."""

    longest_s = 0.6  # a little more than the time of a call

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, VirtualTimeLoop)
        waiting: list[Any] = []

        def pass_deadline() -> None:
            loop.block(self.longest_s)
            loop.call_soon(arrive)

        def arrive() -> None:
            waiting.append(out(Delta("Hello", 1)))
            arrived.set()

        loop.call_soon(pass_deadline)
        try:
            await arrived.wait()
            await waiting.pop()
        finally:
            for one in waiting:
                one.close()
        raise AssertionError("the deadline has passed")


@virtual_time
async def test_a_first_piece_in_the_turn_of_the_deadline_is_given_and_billed(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[LateBackend("local")], route={"fallback": []})
    sink = await rig.run(ask(stream=True, deadline=loop_time() + 0.5))
    assert sink.answer is not None, sink.error
    assert sink.answer.finish_reason is FinishReason.DEADLINE
    assert sink.text == sink.answer.output_text == "Hello"
    assert rig.outbox.rows[0].output_tokens == 1


@virtual_time
async def test_a_deadline_in_a_continuation_ends_it_with_what_there_is(build_rig: Build, ask: Ask) -> None:
    slow = replace(WHOLE, delay_s=0.8)
    rig = build_rig(backends=[backend(breaking(4), slow)], spelling=SPELLING)
    sink = await rig.run(ask(stream=True, deadline=loop_time() + 2.5))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEADLINE
    assert TEXT.startswith(sink.text) and len(sink.text) > len("Vinland Saga")
    assert sink.answer.usage.output_tokens == rig.outbox.rows[0].output_tokens < len(PIECES)


@virtual_time
async def test_a_wait_that_passes_the_deadline_leaves_time_for_the_degraded_text(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[restarting(breaking(0, GONE), restart_s=30)], spelling=SPELLING)
    sink = await rig.run(ask(deadline=loop_time() + 1.5))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEGRADED


async def test_an_answer_that_breaks_behind_its_last_token_is_whole(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[backend(breaking(8), WHOLE)], spelling=SPELLING)
    sink = await rig.run(ask(stream=True, sampling=Sampling(max_tokens=len(PIECES))))
    assert sink.answer is not None
    assert (sink.answer.output_text, sink.answer.finish_reason) == (TEXT, FinishReason.LENGTH)
    assert sink.answer.usage.output_tokens == len(PIECES)
    assert len(rig.backends["local"].calls) == 1


async def test_log_probabilities_come_once_for_each_token(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[backend(breaking(3), WHOLE)], spelling=SPELLING)
    asked = ask(stream=True, contract=Contract.CHAT, model="scripted", sampling=Sampling(logprobs=0))
    sink = await rig.run(asked)
    check_whole(rig, sink)
    assert sink.answer is not None and sink.answer.logprobs is not None
    assert [entry.text for entry in sink.answer.logprobs] == list(PIECES)
    assert [entry.text for delta in sink.deltas for entry in delta.logprobs] == list(PIECES)


async def test_nothing_is_left_when_the_caller_leaves_at_any_await_of_a_seam(
    build_rig: Build, ask: Ask
) -> None:
    plain = Script(BYTES, token_ids=IDS)  # each piece has its text, so tokens delivered are tokens sent
    scripts = [breaking(3, script=plain), breaking(1, script=plain), breaking(0, script=plain)]

    def build() -> JourneyRig:
        return build_rig(
            backends=[backend(*scripts), backend(plain, name="other")],
            route={"fallback": ["other"]},
            spelling=SPELLING,
        )

    turns, rig = await cancel_at_every_turn(build, ask(stream=True))
    assert turns > 12
    assert (rig.outbox.rows[0].finish_reason, rig.outbox.rows[0].fallback) == ("stop", "other")


async def test_nothing_is_left_when_the_caller_leaves_while_waiting_for_a_restart(
    build_rig: Build, ask: Ask
) -> None:
    engine = restarting(breaking(2, GONE), restart_s=30)
    rig = build_rig(backends=[engine], spelling=SPELLING)
    sink = RecordingSink()
    journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(stream=True), sink))
    async with asyncio.timeout(30):
        await engine.waited_for.wait()
    assert not journey.done()
    journey.cancel()
    await asyncio.gather(journey, return_exceptions=True)
    assert rig.in_use() == []
    assert (rig.outbox.rows[0].finish_reason, rig.outbox.rows[0].output_tokens) == ("cancelled", 2)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(breaks=st.lists(st.integers(1, len(PIECES)), max_size=4), stream=st.booleans())
async def test_any_split_over_up_to_four_breaks_gives_the_same_text_and_count(
    build_rig: Build, ask: Ask, breaks: Sequence[int], stream: bool
) -> None:
    # A call that gives no new text is not repeated on the same backend, so each call here gives some.
    scripts = [breaking(after) for after in breaks]
    rig = build_rig(
        backends=[backend(*scripts, WHOLE), backend(WHOLE, name="other")],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=stream))
    check_whole(rig, sink)
    if stream:
        assert sink.text == TEXT


@pytest.mark.parametrize("k", [1, 2])
async def test_the_commit_buffer_makes_an_early_failure_invisible(build_rig: Build, ask: Ask, k: int) -> None:
    fresh = Script(("Quite", " another", " answer", "."))
    rig = build_rig(
        backends=[
            backend(breaking(k, GONE), continues=frozenset()),
            backend(fresh, name="far", continues=frozenset()),
        ],
        route={"fallback": ["far"], **HELD_BACK},
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is not None and sink.answer.fallback is not None
    assert sink.text == sink.answer.output_text == "Quite another answer."
    assert rig.outbox.rows[0].output_tokens == sink.answer.usage.output_tokens == 4
    assert rig.in_use() == []


@virtual_time
async def test_the_commit_buffer_lets_go_in_time_when_no_further_piece_comes(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(Script(("a", "b"), delay_s=0.8), route={"resume": {"commit_chunks": 3, "commit_ms": 20}})
    sink = RecordingSink()
    async with asyncio.TaskGroup() as tasks:
        journey = tasks.create_task(rig.journey.run(ask(stream=True), sink))
        await sink.first_delta.wait()
        assert not journey.done() and sink.text == "a"
        assert loop_time() < 1, "20 ms after the first piece, which comes after 0.8 s"
    assert sink.text == "ab"
    assert rig.in_use() == []


@virtual_time
async def test_the_commit_buffer_lets_go_in_time_when_a_slow_backend_resumes_the_answer(
    build_rig: Build, ask: Ask
) -> None:
    silent = replace(WHOLE, delay_s=3600.0)
    rig = build_rig(
        backends=[backend(breaking(1), continues=frozenset()), backend(silent, name="far")],
        route={"fallback": ["far"], "resume": {"commit_chunks": 3, "commit_ms": 20}},
        spelling=SPELLING,
    )
    sink = RecordingSink()
    async with asyncio.TaskGroup() as tasks:
        journey = tasks.create_task(rig.journey.run(ask(stream=True), sink))
        await sink.first_delta.wait()
        assert sink.text == "Vin" and loop_time() < 1
        journey.cancel()
    assert rig.in_use() == []


@virtual_time
async def test_an_answer_that_can_be_resumed_exactly_is_not_held_back(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[backend(replace(WHOLE, delay_s=0.1))], spelling=SPELLING)
    sink = RecordingSink()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.journey.run(ask(stream=True), sink))
        await sink.first_delta.wait()
        assert len(sink.deltas) == 1 and loop_time() < 0.15, "a piece comes every 0.1 s"


async def test_nothing_is_left_when_the_caller_leaves_while_pieces_are_held_back(
    build_rig: Build, ask: Ask
) -> None:
    for turns in range(60):
        rig = build_rig(
            backends=[
                backend(breaking(2, GONE), continues=frozenset()),
                backend(WHOLE, name="far", continues=frozenset()),
            ],
            route={"fallback": ["far"]},
        )
        journey = asyncio.get_running_loop().create_task(rig.journey.run(ask(stream=True), RecordingSink()))
        for _ in range(turns):
            await asyncio.sleep(0)
        journey.cancel()
        await asyncio.gather(journey, return_exceptions=True)
        assert rig.in_use() == [], f"after {turns} turns"
        assert len(rig.outbox.rows) <= 1


# Resumed streams in each contract


def broken_rig(build_rig: Build, k: int) -> JourneyRig:
    return build_rig(
        backends=[backend(breaking(k), WHOLE)], route={"prompt_version": None}, spelling=SPELLING
    )


BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


async def posted(rig: JourneyRig, path: str, body: dict[str, Any]) -> list[Any]:
    app = create_app(fake_services(journey=rig.journey))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {CALLER_KEY}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://gw", headers=headers) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return list(json_events(reply.text.split("\n")))


@pytest.mark.parametrize("k", range(1, len(PIECES) + 1))
async def test_a_native_stream_shows_no_seam(build_rig: Build, k: int) -> None:
    rig = broken_rig(build_rig, k)
    events = await posted(rig, "/v1/generate", BODY)
    assert "".join(event["delta"] for event in events[:-1]) == TEXT
    assert events[-1]["type"] == "done"
    assert events[-1]["usage"]["output_tokens"] == len(PIECES)
    assert len(rig.outbox.rows) == 1


@pytest.mark.parametrize("k", range(1, len(PIECES) + 1))
async def test_an_openai_stream_shows_no_seam(build_rig: Build, k: int) -> None:
    rig = broken_rig(build_rig, k)
    body = {**BODY, "model": "scripted", "stream_options": {"include_usage": True}}
    chunks = await posted(rig, "/v1/chat/completions", body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == TEXT
    assert sum("role" in delta for delta in deltas) == 1
    assert chunks[-1]["usage"]["completion_tokens"] == len(PIECES)


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/chat/completions"])
async def test_without_a_continuation_a_stream_ends_in_an_error_event(build_rig: Build, path: str) -> None:
    rig = build_rig(backends=[backend(breaking(4), continues=frozenset())], spelling=SPELLING)
    body = {**BODY, "model": "scripted"} if "chat" in path else BODY
    events = await posted(rig, path, body)
    assert events[-1]["error"]["code"] == "backend_unavailable"
    if path == "/v1/generate":
        assert events[-1]["partial"] is True


@pytest.mark.parametrize("continues", [EXACT, frozenset[Continue]()])
async def test_a_web_socket_shows_no_seam_or_the_error(
    build_rig: Build, continues: frozenset[Continue]
) -> None:
    rig = build_rig(backends=[backend(breaking(4), WHOLE, continues=continues)], spelling=SPELLING)
    with serving(fake_services(journey=rig.journey)) as base:  # type: ignore[arg-type]
        url = base.replace("http", "ws") + "/v1/generate/ws"
        async with connect_socket(
            url, additional_headers={"Authorization": f"Bearer {CALLER_KEY}"}
        ) as socket:
            await socket.send(json.dumps({"messages": BODY["messages"]}))
            events = [json.loads(frame) async for frame in socket]
    text = "".join(event["delta"] for event in events[:-1])
    if continues:
        assert (text, events[-1]["type"]) == (TEXT, "done")
    else:
        assert (text, events[-1]["type"], events[-1]["partial"]) == ("Vinland Saga", "error", True)


async def test_a_leg_that_refuses_to_go_on_is_no_fault_of_the_request(build_rig: Build, ask: Ask) -> None:
    strangers = Script(("Quite", " another"), token_ids=(0, 1))  # refuses to resume another answer
    rig = build_rig(
        backends=[
            backend(breaking(3, GONE), continues=frozenset()),
            backend(strangers, name="far"),
            backend(WHOLE, name="near"),
        ],
        route={"fallback": ["far", "near"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is not None and sink.answer.backend_name == "near"
    assert sink.text == TEXT
    results = [event.result for event in rig.events if isinstance(event, Resumed)]
    assert results == ["broken", "whole"]


async def test_a_retry_of_an_answer_that_nobody_has_seen_keeps_its_tokens(build_rig: Build, ask: Ask) -> None:
    preempted = BackendFailure(FailureKind.PREEMPTED, "pushed out")
    rig = build_rig(backends=[backend(breaking(5, preempted), WHOLE)], spelling=SPELLING)
    check_whole(rig, await rig.run(ask()))
    [_, second] = rig.backends["local"].calls
    assert second.partial is not None and second.partial.token_ids == IDS[:5]


async def test_an_answer_that_was_not_delivered_is_not_billed(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[backend(breaking(5, GONE), continues=frozenset())], route={"fallback": []})
    sink = await rig.run(ask())
    assert sink.error is not None
    [row] = rig.outbox.rows
    assert (row.output_tokens, row.finish_reason) == (0, "error")


async def test_many_answers_of_a_dead_engine_all_come_back_whole(build_rig: Build, ask: Ask) -> None:
    count = 24
    slow = replace(WHOLE, delay_s=0.002)
    engine = restarting(*[breaking(k, GONE, slow) for k in range(0, 9, 2)], slow)
    engine.start_barrier = asyncio.Barrier(5)
    engine.load = BackendLoad(running=1, max_running=5, total_blocks=1000, block_size=16)
    rig = build_rig(backends=[engine], spelling=SPELLING, limits=AdmissionLimits(max_input_tokens=4096))
    sinks = await asyncio.gather(
        *[rig.run(ask(request_id=f"r{i}", generation_id=f"g{i}", stream=i % 2 == 0)) for i in range(count)]
    )
    for sink in sinks:
        assert sink.answer is not None and sink.answer.output_text == TEXT
        assert sink.answer.usage.output_tokens == len(PIECES)
    assert len(rig.outbox.rows) == count
    assert rig.in_use() == []


async def test_pieces_that_are_held_back_are_not_given_before_the_degraded_text(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(backends=[backend(breaking(2, GONE), continues=frozenset())], route=HELD_BACK)
    sink = await rig.run(ask(stream=True))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEGRADED
    assert sink.text == sink.answer.output_text
    assert "Vin" not in sink.text


async def test_a_degenerate_answer_is_never_resumed(build_rig: Build, ask: Ask) -> None:
    nonsense = BackendFailure(FailureKind.DEGENERATE_OUTPUT, "it repeats itself", no_retry_here=True)
    rig = build_rig(
        backends=[backend(breaking(5, nonsense)), backend(WHOLE, name="other")],
        route={"fallback": ["other"]},
        spelling=SPELLING,
    )
    sink = await rig.run(ask())
    assert sink.answer is not None and sink.answer.output_text == TEXT
    [work] = rig.backends["other"].calls
    assert work.partial is None
    sink = await rig.run(ask(stream=True, generation_id="gen_2"))
    assert sink.error is not None and len(rig.backends["other"].calls) == 1
