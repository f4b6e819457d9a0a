"""Tool calls and reasoning in a worker's stream: read as valid events, repaired, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.values import Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.backends.port import Completion, Work
from gateway.backends.tool_deltas import CALLS_LEFT_OUT, CALLS_NOT_ALLOWED
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.errors import BadHttp
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.events import AnswerFold, Delta, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.values import FinishReason, FormatType, ResponseFormat, Sampling, Usage
from resilience.failures import BackendFailure, FailureKind
from tests.answer_events import EventSequence, answers
from tests.contracts.test_event_writers import whole
from tests.contracts.test_stream_frames import REQUEST


def read(stream: bytes, *, n: int = 1, cuts: Sequence[int] = ()) -> tuple[list[Delta], Completion]:
    """The events of a stream that arrives in pieces, and its completion."""
    reader = CompletionReader(Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64, n=n)), lambda token: b"")
    deltas: list[Delta] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        deltas += reader.feed(stream[start:end])
        if reader.fault is not None:
            raise reader.fault
    rest, completion = reader.finish()
    return (deltas if rest is None else [*deltas, rest]), completion


def folded(deltas: Sequence[Delta], completion: Completion, n: int = 1) -> AnswerFold:
    fold = AnswerFold(n)
    for delta in deltas:
        fold.take(delta)
    fold.end([completion.finish_reason, *completion.others])
    return fold


def stream_of(*deltas: dict[str, Any], reason: str = "tool_calls", **usage: Any) -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if usage:
        chunks.append({"choices": [], "usage": usage})
    return (
        b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    )


def calls(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": list(entries)}


def begin(name: str, index: int | None = 0, id: str | None = "c1", arguments: str = "") -> dict[str, Any]:
    entry = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {key: value for key, value in entry.items() if value is not None}


def piece(arguments: str, index: int | None = 0, **more: Any) -> dict[str, Any]:
    entry = {"index": index, "function": {"arguments": arguments}, **more}
    return {key: value for key, value in entry.items() if value is not None}


def test_empty_reasoning_and_calls_beside_a_text_are_no_events() -> None:
    """Some servers send them with every piece; the pieces of one read are still one delta."""
    empty = {"reasoning_content": "", "reasoning": "", "refusal": "", "tool_calls": []}
    deltas, _ = read(stream_of({"content": "Hello", **empty}, {"content": " you", **empty}, reason="stop"))
    assert deltas == [Delta("Hello you", 2)]


@given(answers(), st.data())
def test_what_sluice_writes_a_sluice_reads_in_any_pieces(
    sequence: EventSequence, data: st.DataObject
) -> None:
    frames = OpenAIDialect(chat=True).frames(ParsedRequest(REQUEST))
    written = [frames.delta(one) if type(one) is Delta else frames.event(one) for one in sequence.events]
    stream = frames.opening + b"".join(written) + frames.finish(whole(sequence))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    n = len(sequence.reasons)
    deltas, completion = read(stream, n=n, cuts=cuts)
    fold = folded(deltas, completion, n)
    for index in range(n):
        assert fold.text(index) == sequence.text(index)
        assert fold.reasoning(index) == sequence.reasoning(index)
        assert fold.tool_calls(index) == sequence.tool_calls(index)
    assert (completion.finish_reason, *completion.others) == sequence.reasons


WHOLE = (ToolCall("c1", "stock", '{"a":1}'),)
MADE = (ToolCall("call_gen_1_0", "stock", '{"a":1}'),)
TWO = (*WHOLE, ToolCall("c2", "order", "{}"))


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([calls(begin("stock")), calls(piece('{"a":')), calls(piece("1}"))], WHOLE),
        ([calls(begin("stock", arguments='{"a":1}'))], WHOLE),
        ([calls(begin("stock")), calls(begin("stock", arguments='{"a":1}'))], WHOLE),
        ([calls(begin("stock")), calls(piece("")), calls(piece('{"a":1}', id="c1"))], WHOLE),
        ([calls(begin("stock", id=None)), calls(piece('{"a":1}'))], MADE),
        ([calls(begin("stock", index=None)), calls(piece('{"a":1}', index=None))], WHOLE),
        ([calls(begin("stock", index=1)), calls(piece('{"a":1}', index=1))], WHOLE),
        ([calls(begin("stock", arguments='{"a":1}'), begin("order", 1, "c2"))], TWO),
        ([calls(begin("stock", arguments='{"a":1}'), begin("order", 1, "c2", "null"))], TWO),
        ([calls(begin("stock", arguments='{"a":1}')), calls(begin("order", 0, "c2", "{}"))], TWO),
        ([calls(begin("stock", arguments='{"a":1}')), calls(begin("order", None, "c2", "{}"))], TWO),
        (
            [calls(begin("stock", arguments='{"a":1}')), calls(begin("order", 1, "c1", "{}"))],
            (*WHOLE, ToolCall("call_gen_1_1", "order", "{}")),
        ),
        (
            [calls(begin("stock", None, "", '{"a":1}'), begin("stock", None, "", '{"a":1}'))],
            (*MADE, ToolCall("call_gen_1_1", "stock", '{"a":1}')),
        ),
        (
            [calls(begin("stock", 0, None, '{"a":1}')), calls(begin("order", 0, None, "{}"))],
            (*MADE, ToolCall("call_gen_1_1", "order", "{}")),
        ),
        (
            [calls(begin("stock", 0, None, '{"a":')), calls(begin("stock", 0, None, "1}"))],
            MADE,
        ),
        (
            [calls({"index": 0, "id": "c1", "type": "custom", "custom": {"name": "x", "input": "a b"}})],
            (ToolCall("c1", "x", "a b", ToolKind.CUSTOM),),
        ),
    ],
    ids=[
        "in pieces", "at once", "doubled name", "empty piece and repeated id", "no id", "no index",
        "first index 1", "two in a chunk, one without arguments",
        "two in a chunk, one with null", "two under one index",
        "second without index", "one id for two", "whole without ids and indices",
        "whole under one index without ids", "name with each piece", "custom",
    ],
)  # fmt: skip
def test_unambiguous_calls_are_repaired(deltas: list[dict[str, Any]], expected: tuple[ToolCall, ...]) -> None:
    found = folded(*read(stream_of(*deltas)))
    assert found.tool_calls() == expected


THREE = (
    ToolCall("c1", "stock", '{"a":{"b":1}}'),
    ToolCall("c2", "order", '{"c":2}'),
    ToolCall("c3", "stock", "{}"),
)


@pytest.mark.parametrize(
    "order", ["000111222", "012012012", "001212012", "010011222", "021120102", "012221100"], ids=str
)
def test_pieces_of_several_calls_may_come_interleaved_and_are_written_one_call_after_the_other(
    order: str,
) -> None:
    named = [begin(one.name, number, one.id) for number, one in enumerate(THREE)]
    pieces = [['{"a":{"b', '":1}', "}"], ['{"c', '":2', "}"], ["", "{", "}"]]
    entries: list[dict[str, Any]] = []
    begun = 0
    for number in map(int, order):
        entries += [calls(one) for one in named[begun : number + 1]]
        begun = max(begun, number + 1)
        entries.append(calls(piece(pieces[number].pop(0), number)))
    deltas, completion = read(stream_of(*entries))
    assert folded(deltas, completion).tool_calls() == THREE, "the fold refuses events of two open calls"


def test_a_custom_tools_call_waits_until_its_function_form_is_whole() -> None:
    tools = (Tool("patch", ToolKind.CUSTOM), Tool("stock"))
    work = Work("gen_1", (1,), (), Sampling(), tools=tools)
    reader = CompletionReader(work, lambda token: b"", custom_tools=False)
    entries = [
        begin("patch"),
        begin("stock", 1, "c2", "{"),
        piece('{"input": "a b"'),
        piece("}"),
        piece("}", 1),
    ]
    deltas = reader.feed(stream_of(*map(calls, entries)))
    expected = (ToolCall("c1", "patch", "a b", ToolKind.CUSTOM), ToolCall("c2", "stock", "{}"))
    assert folded(deltas, reader.finish()[1]).tool_calls() == expected


def test_without_parallel_calls_only_the_first_call_is_given_and_a_warning_says_so() -> None:
    """Some servers ignore ``parallel_tool_calls``."""
    work = Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64), parallel_tool_calls=False)
    reader = CompletionReader(work, lambda token: b"")
    deltas = reader.feed(
        stream_of(
            calls(begin("stock"), begin("order", 1, "c2")), calls(piece("{}", 1)), calls(piece('{"a":1}'))
        )
    )
    rest, completion = reader.finish()
    assert rest is None and completion.warnings == (CALLS_LEFT_OUT,)
    assert folded(deltas, completion).tool_calls() == (ToolCall("c1", "stock", '{"a":1}'),)


def test_with_a_tool_choice_of_none_no_call_is_given_and_a_warning_says_so() -> None:
    """Some servers ignore ``tool_choice``."""
    choice = ToolChoice(ToolChoiceMode.NONE)
    work = Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64), tools=(Tool("stock"),), tool_choice=choice)
    reader = CompletionReader(work, lambda token: b"")
    deltas = reader.feed(
        stream_of({"content": "Yes"}, calls(begin("stock", None)), calls(piece("{}", None)), {"content": "."})
    )
    _, completion = reader.finish()
    assert folded(deltas, completion).text() == "Yes." and not folded(deltas, completion).tool_calls()
    assert sum(delta.tokens for delta in deltas) == 4
    assert completion.finish_reason is FinishReason.STOP
    assert completion.warnings == (CALLS_NOT_ALLOWED,)


def test_a_call_after_a_whole_one_does_not_wait() -> None:
    reader = CompletionReader(Work("gen_1", (1,), (), Sampling()), lambda token: b"")
    stream = stream_of(calls(begin("stock", arguments='{"a":1}')), calls(begin("order", 1, "c2", '{"b')))
    first, second, *_ = stream.split(b"\n\n")
    reader.feed(first + b"\n\n")
    found = reader.feed(second + b"\n\n")
    assert [type(one) for one in found if type(one) is not Delta] == [ToolEnd, ToolBegin, ToolArgs]


def test_a_call_that_waits_when_the_length_cuts_the_answer_is_shown_as_far_as_it_is_known() -> None:
    first = {"choices": [{"index": 0, "delta": calls(begin("stock"), begin("order", 1, "c2"))}]}
    last = {"choices": [{"index": 0, "delta": calls(piece('{"a', 1)), "finish_reason": "length"}]}
    chunks = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in (first, last)]
    deltas, completion = read(b"".join([*chunks, b"data: [DONE]\n\n"]))
    assert completion.finish_reason is FinishReason.LENGTH
    found = folded(deltas, completion)
    assert found.tool_calls() == (ToolCall("c1", "stock", "{}"), ToolCall("c2", "order", '{"a'))
    assert found.in_call()


@pytest.mark.parametrize("name", ["", "sto"])
def test_a_call_that_the_length_cuts_inside_its_name_is_none(name: str) -> None:
    chunk = {"choices": [{"index": 0, "delta": calls(begin(name)), "finish_reason": "length"}]}
    stream = b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
    deltas, completion = read(stream)
    assert completion.finish_reason is FinishReason.LENGTH
    assert folded(deltas, completion).tool_calls() == ()


@pytest.mark.parametrize(
    ("deltas", "said"),
    [
        ([calls(piece("{}"))], "tool call 0 of the stream has no name"),
        ([calls(begin("")), calls(piece("{}"))], "tool call 0 of the stream has no name"),
        ([calls(begin("stock")), calls(begin("order"))], "tool call 0 of the stream has two names"),
        (
            [calls(begin("stock", arguments="{}"), begin("order", 1, "c2")), calls(piece("{}", 0))],
            "tool call 0 of the stream goes on after it has ended",
        ),
        (
            [calls(begin("stock", arguments="{}")), {"content": "Hm."}, calls(piece("{}", 0))],
            "tool call 0 of the stream goes on after it has ended",
        ),
    ],
)
def test_calls_without_one_meaning_are_refused(deltas: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(BadHttp, match=said):
        read(stream_of(*deltas))


def test_a_call_of_a_tool_that_is_not_allowed_is_the_models_fault_and_reaches_no_caller() -> None:
    choice = ToolChoice(allowed=("order",))
    work = Work("gen_1", (1,), (), Sampling(), tools=(Tool("stock"), Tool("order")), tool_choice=choice)
    deltas = CompletionReader(work, lambda token: b"").feed(stream_of(calls(begin("order"))))
    assert folded(deltas, Completion(FinishReason.TOOL_CALLS, Usage(), 0.0)).tool_calls()[0].name == "order"
    with pytest.raises(BackendFailure, match="not allowed") as caught:
        CompletionReader(work, lambda token: b"").feed(stream_of(calls(begin("stock"))))
    assert caught.value.kind is FailureKind.DEGENERATE_OUTPUT


@pytest.mark.parametrize("said", ["stop", "tool_calls"])
def test_an_answer_with_a_call_ends_for_it_whatever_the_worker_says(said: str) -> None:
    _, completion = read(stream_of(calls(begin("stock", arguments="{}")), reason=said))
    assert completion.finish_reason is FinishReason.TOOL_CALLS
    _, completion = read(stream_of(calls(begin("stock", arguments="{")), reason="length"))
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_from_either_field(field: str) -> None:
    stream = stream_of({field: "Hm. "}, {field: "Well."}, {"content": "Yes."}, reason="stop")
    fold = folded(*read(stream))
    assert (fold.reasoning(), fold.text()) == ("Hm. Well.", "Yes.")


def test_a_piece_of_the_open_call_comes_before_the_text_of_its_chunk() -> None:
    """With several tokens a step, vLLM writes the end of a call and what follows it into one chunk."""
    stream = stream_of(calls(begin("f", arguments='{"a"')), {"content": "Done.", **calls(piece(":1}"))})
    deltas, completion = read(stream)
    assert folded(deltas, completion).tool_calls() == (ToolCall("c1", "f", '{"a":1}'),)
    assert [one.text for one in deltas if type(one) is Delta] == ["Done."]
    assert isinstance(deltas[-2], ToolEnd)


@pytest.mark.parametrize("first", [{"content": "\n"}, {"reasoning": "Hm."}])
@pytest.mark.parametrize("cut", [False, True])
def test_text_between_the_pieces_of_a_call_follows_it(first: dict[str, Any], cut: bool) -> None:
    pieces = [calls(begin("f")), first, calls(piece('{"a"')), {"content": "\n"}, calls(piece(":1}"))]
    deltas, completion = read(stream_of(*pieces[: 4 if cut else 5], reason="length" if cut else "tool_calls"))
    fold = folded(deltas, completion)
    assert fold.tool_calls() == (ToolCall("c1", "f", '{"a"' if cut else '{"a":1}'),)
    text = "" if cut else "".join(one.get("content", "") for one in (first, pieces[3]))
    assert fold.text() == text
    assert sum(delta.tokens for delta in deltas) == (4 if cut else 5)


@pytest.mark.parametrize(
    ("after", "tokens"),
    [
        ({"content": "It is an answer of 30 letters."}, [8, 24]),
        ({"content": "No"}, [27, 5]),
        ({"content": "No" * 1_000}, [1, 31]),
        (calls(begin("stock", arguments='{"a":1}')), [15, 17, 0]),
    ],
)
def test_a_piece_of_reasoning_and_of_what_follows_divides_its_tokens(
    after: dict[str, Any], tokens: list[int]
) -> None:
    choice = {"index": 0, "delta": {"reasoning": "Why, then.", **after}, "token_ids": [*range(32)]}
    reader = CompletionReader(Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64)), lambda token: b"")
    deltas = reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    assert [delta.tokens for delta in deltas] == tokens
    assert [len(delta.token_ids) for delta in deltas] == tokens
    assert [token for delta in deltas for token in delta.token_ids] == [*range(32)]


def test_reasoning_in_both_fields_is_read_once() -> None:
    stream = stream_of({"reasoning": "Hm.", "reasoning_content": "Hm."}, {"content": "Yes."}, reason="stop")
    assert folded(*read(stream)).reasoning() == "Hm."


def test_a_call_that_is_cut_by_the_length_stays_open() -> None:
    deltas, completion = read(stream_of(calls(begin("stock", arguments='{"a')), reason="length"))
    fold = folded(deltas, completion)
    assert completion.finish_reason is FinishReason.LENGTH
    assert fold.in_call()
    assert fold.tool_calls()[0].arguments == '{"a'


def stopped(*deltas: dict[str, Any], **changes: Any) -> tuple[AnswerFold, Completion]:
    """The answer of a stream that ended, as the worker reports, by a stop string."""
    work = Work("gen_1", (1,), (), Sampling(stop=("END",)), **changes)
    reader = CompletionReader(work, lambda token: b"", custom_tools=False)
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks[-1]["choices"][0] |= {"finish_reason": "stop", "stop_reason": "END"}
    found = [one for chunk in chunks for one in reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")]
    rest, completion = reader.finish()
    return folded(found if rest is None else [*found, rest], completion), completion


@pytest.mark.parametrize(
    ("arguments", "given", "whole"), [('{"input": "a b', "a b", False), ('{"input": "a b"', "a b", True)]
)
def test_a_custom_tools_text_that_a_stop_string_cuts_stays_open(
    arguments: str, given: str, whole: bool
) -> None:
    tools = (Tool("patch", ToolKind.CUSTOM),)
    fold, completion = stopped(calls(begin("patch")), calls(piece(arguments)), tools=tools)
    assert fold.tool_calls()[0].arguments == given and fold.in_call() is not whole
    assert completion.finish_reason is (FinishReason.TOOL_CALLS if whole else FinishReason.LENGTH)
    assert (completion.stop_sequence is None) is not whole


def test_a_call_that_a_stop_string_cuts_at_its_name_is_none_or_open() -> None:
    tools = (Tool("stock"),)
    fold, completion = stopped({"content": "So"}, calls(begin("sto")), tools=tools)
    assert (fold.tool_calls(), completion.finish_reason) == ((), FinishReason.STOP)
    fold, completion = stopped({"content": "So"}, calls(begin("stock")), tools=tools)
    assert fold.in_call() and completion.finish_reason is FinishReason.LENGTH


def test_the_name_of_an_unknown_tool_is_not_cut_if_its_arguments_follow_in_the_last_chunk() -> None:
    bare = {"index": 0, "id": "c1", "function": {"name": "other"}}
    fold, _ = stopped(calls(bare, piece('{"')), tools=(Tool("stock"),))
    assert fold.tool_calls() == (ToolCall("c1", "other", '{"'),)


def test_tool_calls_as_the_end_of_an_answer_without_a_call_is_a_plain_end() -> None:
    _, completion = read(stream_of({"content": "Yes."}))
    assert completion.finish_reason is FinishReason.STOP


def test_every_token_is_counted_once() -> None:
    stream = stream_of(
        {"reasoning": "Hm."},
        {"content": "Yes."},
        calls(begin("stock")),
        calls(piece('{"a":1}')),
        prompt_tokens=3,
        completion_tokens=9,
        completion_tokens_details={"reasoning_tokens": 2},
    )
    deltas, completion = read(stream)
    assert sum(delta.tokens for delta in deltas) == 9
    assert completion.usage.output_tokens == 9
    assert completion.usage.reasoning_tokens == 2


@given(st.text(st.characters(exclude_categories=("Cs",))), st.booleans(), st.data())
def test_a_custom_tool_that_was_called_as_a_function_has_its_raw_text_in_any_pieces(
    text: str, ascii_only: bool, data: st.DataObject
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(arguments) - 1), max_size=6)))
    pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    stream = stream_of(calls(begin("patch")), *(calls(piece(one)) for one in pieces))
    assert custom_call(stream) == ToolCall("c1", "patch", text, ToolKind.CUSTOM)


@pytest.mark.parametrize("arguments", ["*** Begin Patch", '{"patch": "x"}', ""])
def test_arguments_of_another_form_are_the_custom_tools_text(arguments: str) -> None:
    stream = stream_of(calls(begin("patch")), *([calls(piece(arguments))] if arguments else []))
    assert custom_call(stream) == ToolCall("c1", "patch", arguments, ToolKind.CUSTOM)


def custom_call(stream: bytes) -> ToolCall:
    work = Work("gen_1", (1,), (), Sampling(), tools=(Tool("patch", ToolKind.CUSTOM),))
    reader = CompletionReader(work, lambda token: b"", custom_tools=False)
    deltas = reader.feed(stream)
    if reader.fault is not None:
        raise reader.fault
    rest, completion = reader.finish()
    [call] = folded([*deltas, *([] if rest is None else [rest])], completion).tool_calls()
    return call


@pytest.mark.parametrize(
    ("choice", "strict", "delta", "custom_tools", "warned"),
    [
        (None, None, {"content": "{}"}, False, True),
        (ToolChoice(), False, {"content": "{}"}, False, True),
        (None, True, {"content": "{}"}, False, False),
        (ToolChoice(ToolChoiceMode.NONE), None, {"content": "{}"}, False, False),
        (None, None, calls(begin("stock", arguments="{}")), False, False),
        (None, None, {"content": "{}"}, True, False),
    ],
    ids=["by default", "auto", "strict tool", "none", "called", "other than vLLM"],
)
def test_a_form_that_may_have_kept_a_vllm_from_calling_a_tool_is_a_warning(
    choice: ToolChoice | None, strict: bool | None, delta: dict[str, Any], custom_tools: bool, warned: bool
) -> None:
    tools, shape = (Tool("stock", strict=strict),), ResponseFormat(FormatType.JSON_OBJECT)
    work = Work("gen_1", (1,), (), Sampling(), shape, tools=tools, tool_choice=choice)
    reader = CompletionReader(work, lambda token: b"", custom_tools=custom_tools)
    reader.feed(stream_of(delta, reason="stop"))
    assert bool(reader.finish()[1].warnings) is warned
