"""Reasoning and tool calls in a journey: whole, broken off, resumed, and faulty."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from budgeting.values import Tool, ToolCall, ToolChoice, ToolChoiceMode
from gateway.backends.port import Continue
from gateway.contracts.events import AnswerFold, Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.values import FinishReason, GenerateRequest, Sampling, TokenLogprob
from gateway.generation.json_schema import breaks_schema
from observability.events import ToolCallCounts
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import JourneyRig, PieceTokenizer, RecordingSink
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

EVENTS: tuple[Delta, ...] = (
    Reasoning("The user ", 1),
    Reasoning("wants stock.", 1),
    Delta("Let me ", 1),
    Delta("look.", 1),
    ToolBegin("stock", 1, call=0, id="call_a"),
    ToolArgs('{"item"', 1, call=0),
    ToolArgs(': "Vinland Saga"}', 1, call=0),
    ToolEnd("", 1, call=0),
    ToolBegin("order", 1, call=1, id="call_b"),
    ToolArgs("{}", 1, call=1),
    ToolEnd("", 1, call=1),
)
CALLS = (ToolCall("call_a", "stock", '{"item": "Vinland Saga"}'), ToolCall("call_b", "order", "{}"))
TOOLS = (Tool("stock"), Tool("order"), Tool("price"))
IDS = tuple(range(100, 100 + len(EVENTS)))
WHOLE = Script(events=EVENTS, token_ids=IDS, finish_reason=FinishReason.TOOL_CALLS)
BROKEN = BackendFailure(FailureKind.STREAM_BROKEN, "cut")
EXACT = frozenset({Continue.TOKENS, Continue.EVENTS})


def backend(*scripts: Script, name: str = "local", continues: frozenset[Continue] = EXACT) -> ScriptedBackend:
    return ScriptedBackend(name, scripts=scripts, continues=continues)


def folded(sink: RecordingSink) -> AnswerFold:
    """Returns the fold of the caller's stream; raises if an event is not legal."""
    fold = AnswerFold()
    for delta in sink.deltas:
        fold.take(delta)
    assert sink.answer is not None, sink.error
    fold.end([sink.answer.finish_reason])
    return fold


def check_whole(rig: JourneyRig, sink: RecordingSink, *, stream: bool) -> None:
    answer = sink.answer
    assert answer is not None, sink.error
    assert answer.output_text == "Let me look."
    assert answer.reasoning == "The user wants stock."
    assert answer.tool_calls == CALLS
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert answer.usage.output_tokens == len(EVENTS)
    if stream:
        fold = folded(sink)
        assert (fold.text(), fold.reasoning(), fold.tool_calls()) == (
            answer.output_text,
            answer.reasoning,
            answer.tool_calls,
        )
        assert fold.in_order() == answer.events
    assert len(rig.outbox.rows) == 1
    assert rig.in_use() == []


@pytest.mark.parametrize("stream", [True, False])
async def test_the_whole_answer_is_the_fold_of_its_events(build_rig: Build, ask: Ask, stream: bool) -> None:
    rig = build_rig(backends=[backend(WHOLE)])
    check_whole(rig, await rig.run(ask(stream=stream)), stream=stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("k", range(1, len(EVENTS) + 1))
async def test_an_answer_that_breaks_after_any_event_is_resumed_without_a_repeated_or_missing_byte(
    build_rig: Build, ask: Ask, k: int, stream: bool
) -> None:
    # The next call gives the same events, but other ids to its tool calls.
    again = list(EVENTS)
    again[4], again[8] = structs.replace(again[4], id="call_x"), structs.replace(again[8], id="call_y")
    rig = build_rig(
        backends=[
            backend(replace(WHOLE, failure=BROKEN, breaks_after=k), replace(WHOLE, events=tuple(again)))
        ]
    )
    sink = await rig.run(ask(stream=stream))
    assert sink.answer is not None, sink.error
    # Tool calls that the first call had not begun have the ids of the second call.
    begun = [call.id for call in sink.answer.tool_calls]
    assert begun == ["call_a" if k > 4 else "call_x", "call_b" if k > 8 else "call_y"]
    named = tuple(ToolCall(mine, call.name, call.arguments) for mine, call in zip(begun, CALLS, strict=True))
    assert sink.answer.tool_calls == named
    assert sink.answer.output_text == "Let me look."
    assert sink.answer.reasoning == "The user wants stock."
    assert sink.answer.usage.output_tokens == len(EVENTS)
    if stream:
        assert folded(sink).tool_calls() == named
        assert folded(sink).reasoning() == "The user wants stock."
        assert folded(sink).in_order() == sink.answer.events
    assert rig.in_use() == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("k", [None, *range(3, 8)])
async def test_a_whole_answer_has_its_texts_around_the_calls_where_they_were_generated(
    build_rig: Build, ask: Ask, k: int | None, stream: bool
) -> None:
    call = (ToolBegin("stock", 1, id="call_a"), ToolArgs("{}", 1), ToolEnd("", 1))
    script = replace(
        WHOLE,
        events=(Delta("Let ", 1), Delta("me look.", 1), *call, Reasoning("Hm.", 1), Delta("Done.", 1)),
        token_ids=IDS[:7],
        finish_reason=FinishReason.STOP,
    )
    scripts = [script] if k is None else [replace(script, failure=BROKEN, breaks_after=k), script]
    rig = build_rig(backends=[backend(*scripts)])
    sink = await rig.run(ask(stream=stream))
    assert sink.answer is not None, sink.error
    assert [(type(one), one.text) for one in sink.answer.in_order] == [
        (Delta, "Let me look."),
        (ToolBegin, "stock"),
        (ToolArgs, "{}"),
        (ToolEnd, ""),
        (Reasoning, "Hm."),
        (Delta, "Done."),
    ]


@pytest.mark.parametrize("first", [Reasoning("Hm.", 1), Delta("Let ", 1)])
async def test_only_a_texts_own_logprobs_are_with_it(build_rig: Build, ask: Ask, first: Delta) -> None:
    events = (first, Reasoning("I see.", 1), Delta("Done.", 1))
    each = tuple(
        structs.replace(event, logprobs=(TokenLogprob(str(at).encode(), -0.5),))
        for at, event in enumerate(events)
    )
    rig = build_rig(backends=[backend(Script(events=each, token_ids=IDS[:3]))])
    sink = await rig.run(ask(sampling=Sampling(logprobs=1)))
    assert sink.answer is not None, sink.error
    texts = [one for one in sink.answer.in_order if type(one) is Delta]
    expected = [str(at).encode() for at, event in enumerate(events) if type(event) is Delta]
    assert [one.data for text in texts for one in text.logprobs] == expected
    assert all(text.text and len(text.logprobs) == 1 for text in texts)


async def test_reasoning_that_breaks_inside_a_character_is_resumed_before_it(
    build_rig: Build, ask: Ask
) -> None:
    ids = tuple("Hé".encode())
    whole = Script(events=(Reasoning("H", 1), Delta("", 1), Reasoning("é", 1)), token_ids=ids)
    pool = backend(replace(whole, failure=BROKEN, breaks_after=2), whole)
    sink = await build_rig(backends=[pool], spelling=PieceTokenizer(())).run(ask())
    assert sink.answer is not None, sink.error
    assert (sink.answer.reasoning, sink.answer.usage.output_tokens) == ("Hé", 3)
    assert [work.partial_ids for work in pool.calls] == [(), ids[:1]]


async def test_a_resumed_answer_with_reasoning_has_the_logprobs_of_tokens_without_text(
    build_rig: Build, ask: Ask
) -> None:
    def piece(text: str) -> Delta:
        return Delta(text, 1, logprobs=(TokenLogprob(text.encode(), -0.5),))

    whole = Script(events=(Reasoning("Hm.", 1), piece("Done"), piece(""), piece("!")), token_ids=IDS[:4])
    rig = build_rig(backends=[backend(replace(whole, failure=BROKEN, breaks_after=1), whole)])
    sink = await rig.run(ask(stream=True, sampling=Sampling(logprobs=1)))
    assert sink.answer is not None, sink.error
    assert [one.data for delta in sink.deltas for one in delta.logprobs] == [b"Done", b"", b"!"]


@pytest.mark.parametrize("k", [1, 6])
@pytest.mark.parametrize("continues", [frozenset({Continue.TOKENS, Continue.TEXT}), frozenset[Continue]()])
async def test_a_backend_that_cannot_resume_events_ends_a_broken_stream_with_an_error(
    build_rig: Build, ask: Ask, k: int, continues: frozenset[Continue]
) -> None:
    broken = replace(WHOLE, failure=BROKEN, breaks_after=k)
    rig = build_rig(
        backends=[backend(broken, continues=continues)],
        route={"resume": {"commit_chunks": 0}},
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is None
    assert sink.error is not None
    assert sink.error.code == "backend_unavailable"
    [row] = rig.outbox.rows
    assert row.output_tokens == k
    assert rig.in_use() == []


@pytest.mark.parametrize("mode", [ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED])
async def test_a_required_call_is_resumed_where_constrained_answers_are(
    build_rig: Build, ask: Ask, mode: ToolChoiceMode
) -> None:
    broken = replace(WHOLE, failure=BROKEN, breaks_after=6)
    asked = ask(stream=True, tools=(Tool("stock"), Tool("order")), tool_choice=ToolChoice(mode, "stock"))
    for ways in (EXACT, EXACT | {Continue.SHAPED}):
        rig = build_rig(
            backends=[backend(broken, WHOLE, continues=ways)], route={"resume": {"commit_chunks": 0}}
        )
        sink = await rig.run(asked)
        assert (sink.answer is not None) is (Continue.SHAPED in ways)
        assert (sink.error is not None) is (Continue.SHAPED not in ways)
        assert rig.in_use() == []


async def test_a_resumed_call_that_differs_from_what_the_caller_has_is_refused(
    build_rig: Build, ask: Ask
) -> None:
    other = (Reasoning("Something else.", 1), *EVENTS[1:])
    rig = build_rig(
        backends=[backend(replace(WHOLE, failure=BROKEN, breaks_after=6), replace(WHOLE, events=other))],
        route={"resume": {"commit_chunks": 0}},
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is None
    assert sink.error is not None
    assert rig.in_use() == []


NOT_JSON: tuple[Delta, ...] = (
    ToolBegin("stock", 1, id="call_a"),
    ToolArgs('{"item": ', 1),
    ToolEnd("", 0),
)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_faulty_call_is_made_again_while_the_caller_has_nothing_of_it(
    build_rig: Build, ask: Ask, stream: bool
) -> None:
    rig = build_rig(
        backends=[
            backend(
                Script(events=NOT_JSON, finish_reason=FinishReason.TOOL_CALLS), WHOLE, continues=frozenset()
            )
        ],
        route={"resume": {"commit_chunks": 8}},
    )
    sink = await rig.run(ask(stream=stream))
    check_whole(rig, sink, stream=stream)


@pytest.mark.parametrize(
    "changes", [{"stream": True}, {"sampling": Sampling(temperature=0.0)}], ids=["sent", "greedy"]
)
@pytest.mark.parametrize("arguments", ['{"item": ', '"Berserk"', "[]", "null"])
async def test_a_call_whose_arguments_are_not_an_object_never_ends_as_tool_calls(
    build_rig: Build, ask: Ask, changes: dict[str, Any], arguments: str
) -> None:
    events = (NOT_JSON[0], ToolArgs(arguments, 1), NOT_JSON[2])
    script = Script(events=events, finish_reason=FinishReason.TOOL_CALLS)
    rig = build_rig(backends=[backend(script)], route={"resume": {"commit_chunks": 0}})
    sink = await rig.run(ask(**changes))
    assert sink.answer is not None, sink.error
    assert sink.answer.finish_reason is FinishReason.ERROR
    assert "the arguments of tool call 0 (stock) are not a JSON object" in sink.answer.warnings
    assert len(rig.backends["local"].calls) == 1


@pytest.mark.parametrize(
    ("mode", "script", "warned"),
    [
        (ToolChoiceMode.REQUIRED, Script(("Hello", ".")), True),
        (ToolChoiceMode.AUTO, Script(("Hello", ".")), False),
        (ToolChoiceMode.REQUIRED, Script(("Hello", "."), finish_reason=FinishReason.LENGTH), False),
        (ToolChoiceMode.REQUIRED, WHOLE, False),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_is_told_that_a_required_call_is_missing(
    build_rig: Build, ask: Ask, mode: ToolChoiceMode, script: Script, warned: bool, stream: bool
) -> None:
    rig = build_rig(backends=[backend(script)])
    sink = await rig.run(ask(stream=stream, tools=TOOLS, tool_choice=ToolChoice(mode)))
    assert sink.answer is not None, sink.error
    missing = "tool_choice requires a tool call, and the model made none"
    assert sink.answer.warnings == ((missing,) if warned else ())


@pytest.mark.parametrize(
    ("name", "script", "warned"),
    [("stock", WHOLE, False), ("price", WHOLE, True), ("price", Script(("Hello", ".")), True)],
)
async def test_a_caller_is_told_that_the_model_did_not_call_the_named_tool(
    build_rig: Build, ask: Ask, name: str, script: Script, warned: bool
) -> None:
    rig = build_rig(backends=[backend(script)])
    sink = await rig.run(ask(tools=TOOLS, tool_choice=ToolChoice(ToolChoiceMode.NAMED, name)))
    assert sink.answer is not None, sink.error
    missing = "tool_choice requires a call of price, and the model made none"
    assert sink.answer.warnings == ((missing,) if warned else ())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_is_told_that_the_model_called_a_tool_that_is_not_in_tools(
    build_rig: Build, ask: Ask, stream: bool
) -> None:
    rig = build_rig(backends=[backend(WHOLE)])
    sink = await rig.run(ask(stream=stream, tools=TOOLS[:1]))
    assert sink.answer is not None, sink.error
    assert sink.answer.tool_calls == CALLS
    assert sink.answer.finish_reason is FinishReason.TOOL_CALLS
    assert sink.answer.warnings == ("the model called order, which is not in tools",)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_an_answer_that_is_cut_inside_a_call_says_so(
    build_rig: Build, ask: Ask, reason: FinishReason
) -> None:
    script = Script(events=NOT_JSON[:2], finish_reason=reason)
    rig = build_rig(backends=[backend(script)], route={"resume": {"commit_chunks": 0}})
    sink = await rig.run(ask(stream=True))
    if reason is FinishReason.LENGTH:
        assert sink.answer is not None, sink.error
        assert sink.answer.finish_reason is FinishReason.LENGTH
        assert sink.answer.tool_calls[0].arguments == '{"item": '
    else:
        assert sink.answer is None
        assert sink.error is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_a_stop_string_ends_is_cut_and_no_fault_of_the_backend(
    build_rig: Build, ask: Ask, stream: bool
) -> None:
    local = backend(Script(events=NOT_JSON, finish_reason=FinishReason.TOOL_CALLS))
    rig = build_rig(backends=[local], route={"resume": {"commit_chunks": 0}})
    sink = await rig.run(
        ask(stream=stream, tools=TOOLS, sampling=Sampling(temperature=0.7, stop=("Vinland",)))
    )
    assert sink.answer is not None, sink.error
    assert (sink.answer.finish_reason, sink.answer.warnings) == (FinishReason.LENGTH, ())
    assert sink.answer.tool_calls[0].arguments == '{"item": '
    assert len(local.calls) == 1
    [record] = rig.records
    assert record.tool_calls == ToolCallCounts(cut=1)


@pytest.mark.parametrize(
    "illegal",
    [
        (ToolArgs("{}", 1),),
        (ToolBegin("a", 1, id="x"), Delta("text", 1)),
        (ToolBegin("a", 1, id="x"), ToolEnd("", 0), ToolBegin("a", 1, call=1, id="x")),
    ],
)
async def test_events_out_of_order_are_an_error_and_never_reach_the_caller(
    build_rig: Build, ask: Ask, illegal: tuple[Delta, ...]
) -> None:
    rig = build_rig(backends=[backend(Script(events=illegal), continues=frozenset())], route={"fallback": []})
    sink = await rig.run(ask(stream=True))
    assert sink.answer is None
    assert sink.error is not None
    assert illegal[-1] not in sink.deltas
    assert rig.in_use() == []


STOCK = '{"type": "object", "properties": {"item": {"type": "integer"}}, "required": ["item"]}'


@pytest.mark.parametrize("strict", [True, False])
async def test_arguments_that_break_a_strict_schema_never_end_as_tool_calls(
    build_rig: Build, ask: Ask, strict: bool
) -> None:
    rig = build_rig(backends=[backend(WHOLE)], route={"resume": {"commit_chunks": 0}})
    sink = await rig.run(ask(stream=True, tools=(Tool("stock", parameters=STOCK, strict=strict),)))
    assert sink.answer is not None, sink.error
    said = "the arguments of tool call 0 (stock) break the schema of the strict tool"
    assert (said in sink.answer.warnings) is strict
    assert sink.answer.finish_reason is (FinishReason.ERROR if strict else FinishReason.TOOL_CALLS)
    [record] = rig.records
    assert record.tool_calls == (ToolCallCounts(whole=1, not_schema=1) if strict else ToolCallCounts(whole=2))


async def test_calls_and_reasoning_are_in_the_usage_row(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[backend(WHOLE)])
    sink = await rig.run(ask())
    assert sink.answer is not None
    assert sink.answer.usage.reasoning_tokens == 2
    [row] = rig.outbox.rows
    assert (row.reasoning_tokens, row.tool_calls, row.output_tokens) == (2, 2, len(EVENTS))


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ((Script(events=NOT_JSON), WHOLE), ToolCallCounts(retried=1, whole=2)),
        ((Script(events=NOT_JSON[:2], finish_reason=FinishReason.LENGTH),), ToolCallCounts(cut=1)),
        ((Script(events=NOT_JSON),), ToolCallCounts(retried=1, not_json=1)),
        ((Script(("no calls",)),), ToolCallCounts()),
    ],
    ids=["retried", "cut", "faulty again", "none"],
)
async def test_every_call_is_counted_once_by_its_outcome(
    build_rig: Build, ask: Ask, scripts: tuple[Script, ...], expected: ToolCallCounts
) -> None:
    rig = build_rig(backends=[backend(*scripts, continues=frozenset())], route={"fallback": []})
    await rig.run(ask(sampling=Sampling(temperature=0.7)))
    [record] = rig.records
    assert (record.status, record.error_code) == (200, None)
    assert record.tool_calls == expected


async def test_a_call_that_a_broken_stream_leaves_is_counted_as_failed(build_rig: Build, ask: Ask) -> None:
    script = Script(events=NOT_JSON, failure=BROKEN, breaks_after=2)
    rig = build_rig(
        backends=[backend(script, continues=frozenset())],
        route={"resume": {"commit_chunks": 0}, "fallback": []},
    )
    sink = await rig.run(ask(stream=True))
    assert sink.error is not None
    [record] = rig.records
    assert record.tool_calls == ToolCallCounts(failed=1)
    [row] = rig.outbox.rows
    assert row.tool_calls == 1


async def test_a_long_schema_of_a_strict_tool_holds_no_other_request_up(build_rig: Build, ask: Ask) -> None:
    def schema(name: str) -> str:
        return json.dumps({"title": name, "type": "integer", "allOf": [{}] * 300})

    assert breaks_schema(b'{"type": "integer"}', {})  # imports the library
    # The loop's own processor time: on a busy machine its thread waits for others.
    began = time.thread_time()
    assert breaks_schema(schema("other").encode(), {})
    took_s, gaps = time.thread_time() - began, [0.0]

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            gaps.append(time.thread_time() - before)

    rig = build_rig(backends=[backend(WHOLE)], route={"resume": {"commit_chunks": 0}})
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        await asyncio.sleep(0)
        sink = await rig.run(ask(stream=True, tools=(Tool("stock", parameters=schema("item"), strict=True),)))
        await asyncio.sleep(0.01)
        watching.cancel()
    assert sink.answer is not None and "break the schema" in sink.answer.warnings[0]
    assert max(gaps) < took_s / 2, (took_s, max(gaps))
