"""Tool calls written as text: what the grammar accepts, and what the reader parses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, grammar_from

from budgeting.values import Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.backends.hermes import CallReader, call_grammar
from gateway.contracts.events import AnswerFold, Delta
from gateway.contracts.values import FinishReason

STOCK = Tool(
    "check_stock",
    parameters='{"additionalProperties":false,"properties":{"title":{"type":"string"}},"required":["title"],"type":"object"}',
)
ORDER = Tool(
    "order_status",
    parameters='{"properties":{"order":{"type":"integer"}},"required":["order"],"type":"object"}',
)
NOTE = Tool("note", ToolKind.CUSTOM)
PLAIN_TOOL = Tool("now")
TOOLS = (STOCK, ORDER, NOTE, PLAIN_TOOL)
A = '<tool_call>{"name":"check_stock","arguments":{"title":"Berserk"}}</tool_call>'
B = '<tool_call>{"name":"order_status","arguments":{"order":12}}</tool_call>'
TRICKY = '<tool_call>{"name":"check_stock","arguments":{"title":"}}</tool_call> \\"{ 猫"}}</tool_call>'
NOW = '<tool_call>{"name":"now","arguments":{}}</tool_call>'

# The grammar of Codex's tool for patches.
PATCH_GRAMMAR = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = """*** Begin Patch
*** Update File: shop.py
@@ def end():
-    return ''
+    return '}</tool_call>'
*** End Patch"""
PATCH_CALL = '<tool_call>{"name":"apply_patch","arguments":' + PATCH


def custom(name: str, syntax: str, definition: str) -> Tool:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return Tool(name, ToolKind.CUSTOM, format=json.dumps(form))


PATCH_TOOL = custom("apply_patch", "lark", PATCH_GRAMMAR)
AUTO = ToolChoice()
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    path = Path(__file__).parents[2] / "models" / "demo" / "tokenizer.json"
    return LLTokenizer(path.read_text(encoding="utf-8"))


def takes(tokenizer: LLTokenizer, grammar: str | None, text: str) -> bool:
    """Returns whether the grammar accepts the whole text."""
    assert grammar is not None
    matcher = LLMatcher(tokenizer, grammar_from("lark", grammar))
    ids = tokenizer.tokenize_str(text)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        (AUTO, True, ["hi", "", "a < b", "<tool", A, A + B, "Let me see. " + A, TRICKY, NOW], [A + "more"]),
        (AUTO, False, ["hi", A, "Well: " + B], [A + B]),
        (REQUIRED, True, [A, B + A], ["hi", "", "so " + A]),
        (ToolChoice(ToolChoiceMode.NAMED, "order_status"), True, [B], [A, "hi", B + B]),
        (ToolChoice(allowed=("order_status",)), True, ["hi", B], [A]),
        (ToolChoice(ToolChoiceMode.NONE), True, ["hi", "<tool_"], [A]),
        (ToolChoice(ToolChoiceMode.REQUIRED, allowed=("check_stock",)), True, [A], [B, "hi"]),
    ],
)
def test_the_grammar_is_the_tools_that_may_be_called(
    tokenizer: LLTokenizer, choice: ToolChoice, parallel: bool, good: Sequence[str], bad: Sequence[str]
) -> None:
    grammar = call_grammar(TOOLS, choice, parallel=parallel)
    assert [text for text in good if not takes(tokenizer, grammar, text)] == []
    assert [text for text in bad if takes(tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        A.replace('":"B', '": "B'),
        A.replace("title", "name"),
        B.replace("12", '"12"'),
        A.replace("check_stock", "other"),
        A.removesuffix(">"),
        NOW.replace("{}", '{"title":"Berserk"}'),
    ],
)
def test_arguments_follow_their_schema_without_padding(tokenizer: LLTokenizer, wrong: str) -> None:
    assert not takes(tokenizer, call_grammar(TOOLS, REQUIRED, parallel=True), wrong)


@pytest.mark.parametrize("parameters", ["{}", '{"description":"x"}', '{"anyOf":[{},{"type":"string"}]}'])
def test_arguments_are_an_object_if_their_schema_leaves_it_open(
    tokenizer: LLTokenizer, parameters: str
) -> None:
    grammar = call_grammar([Tool("check_stock", parameters=parameters)], REQUIRED, parallel=True)
    assert takes(tokenizer, grammar, A)
    assert not takes(tokenizer, grammar, A.replace('{"title":"Berserk"}', '"Berserk"'))


@pytest.mark.parametrize("pattern", ["[a-z]{3,5}", "^[a-z]{3,5}$", "^[a-z]{3}|[a-z]{4,5}$"])
def test_a_custom_tools_input_is_bound_to_its_pattern(tokenizer: LLTokenizer, pattern: str) -> None:
    grammar = call_grammar([custom("note", "regex", pattern)], REQUIRED, parallel=True)
    call = '<tool_call>{"name":"note","arguments":{"input":"%s"}}</tool_call>'
    assert takes(tokenizer, grammar, call % "abc")
    assert not takes(tokenizer, grammar, call % "ab") and not takes(tokenizer, grammar, call % "abc1")


def test_a_patterns_own_dollar_sign_is_no_anchor(tokenizer: LLTokenizer) -> None:
    grammar = call_grammar([custom("price", "regex", r"[0-9]+\$")], REQUIRED, parallel=True)
    call = '<tool_call>{"name":"price","arguments":{"input":"%s"}}</tool_call>'
    assert takes(tokenizer, grammar, call % "12$") and not takes(tokenizer, grammar, call % "12")


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (AUTO, ["hi", PATCH_CALL, "Well: " + A + PATCH_CALL], [PATCH_CALL + A, PATCH_CALL + "}</tool_call>"]),
        (REQUIRED, [A, A + A, A + PATCH_CALL], ["hi", PATCH_CALL.removesuffix("End Patch")]),
        (ToolChoice(ToolChoiceMode.NAMED, "apply_patch"), [PATCH_CALL], [A, A + PATCH_CALL]),
    ],
)
def test_a_custom_tools_lark_grammar_binds_its_input_as_the_answers_last_call(
    tokenizer: LLTokenizer, choice: ToolChoice, good: Sequence[str], bad: Sequence[str]
) -> None:
    grammar = call_grammar([STOCK, PATCH_TOOL], choice, parallel=True)
    assert [text for text in good if not takes(tokenizer, grammar, text)] == []
    assert [text for text in bad if takes(tokenizer, grammar, text)] == []


def test_an_answer_without_calls_may_have_a_shape_of_its_own(tokenizer: LLTokenizer) -> None:
    shape = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = call_grammar(TOOLS, AUTO, parallel=True, content=shape)
    assert takes(tokenizer, grammar, '{"a":1}') and takes(tokenizer, grammar, A)
    assert not takes(tokenizer, grammar, "hi")


def test_without_a_tool_that_may_be_called_there_is_no_grammar() -> None:
    assert call_grammar(TOOLS, ToolChoice(ToolChoiceMode.NONE), parallel=True, content={}) is None
    assert call_grammar((), AUTO, parallel=True) is None


def tool_of(name: str) -> Tool:
    return {tool.name: tool for tool in (*TOOLS, PATCH_TOOL)}[name]


def read(pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Returns text, calls and tokens of an answer in these pieces; raises if an event is not legal."""
    reader, fold, tokens = CallReader("g", tool_of=tool_of), AnswerFold(), 0
    events = [event for piece in pieces for event in reader.feed(Delta(piece, 1, token_ids=(7,)))]
    for event in [*events, *reader.end(stopped=True, by_model=True)]:
        fold.take(event)
        tokens += event.tokens
    calls = fold.tool_calls()
    fold.end([FinishReason.TOOL_CALLS if calls else FinishReason.STOP])
    return fold.text(), [(call.name, call.arguments) for call in calls], tokens


def test_text_and_calls_are_read_apart() -> None:
    text, calls, _ = read(["Well: " + A + TRICKY])
    assert text == "Well: "
    assert calls[0] == ("check_stock", '{"title":"Berserk"}')
    assert json.loads(calls[1][1]) == {"title": '}}</tool_call> "{ 猫'}


def test_a_custom_tools_input_is_its_text() -> None:
    raw = 'line\n"quoted" \\ 猫😀'
    call = f'<tool_call>{{"name":"note","arguments":{json.dumps({"input": raw}, separators=(",", ":"))}}}</tool_call>'
    assert read(list(call))[1] == [("note", raw)]


@pytest.mark.parametrize("by_model", [True, False])
def test_an_input_that_is_no_json_lasts_until_the_model_ends_the_answer(by_model: bool) -> None:
    reader, fold = CallReader("g", tool_of=tool_of), AnswerFold()
    events = [event for piece in A + PATCH_CALL for event in reader.feed(Delta(piece, 1))]
    ends = reader.end(stopped=True, by_model=by_model)
    for event in [*events, *ends]:
        fold.take(event)
    assert [(call.name, call.arguments) for call in fold.tool_calls()][1:] == [("apply_patch", PATCH)]
    assert (reader.in_call, bool(ends)) == (not by_model, by_model)
    assert sum(event.tokens for event in events) == len(A + PATCH_CALL)


@given(st.lists(st.sampled_from(["Hello <tool", " a<", "<tool_call", "x", "猫"])), st.data())
def test_pieces_make_no_difference(before: list[str], data: st.DataObject) -> None:
    whole = "".join(before).replace("<tool_call>", "") + A + TRICKY + B
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=30)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    text, calls, tokens = read(pieces)
    assert (text, calls) == read([whole])[:2] and tokens == len(pieces)


def test_a_text_that_only_begins_like_a_call_comes_whole() -> None:
    assert read(["see <tool_", "cal"])[0] == "see <tool_cal"


@pytest.mark.parametrize("mark", ["<", "<tool_cal", "<tool_call>"])
@pytest.mark.parametrize(("must_call", "before"), [(True, ""), (False, A)])
def test_a_cut_answer_does_not_show_the_beginning_of_a_mark_where_only_a_call_may_follow(
    mark: str, must_call: bool, before: str
) -> None:
    reader = CallReader("g", must_call=must_call, tool_of=tool_of)
    events = [event for piece in before + mark for event in reader.feed(Delta(piece, 1))]
    events += reader.end()
    assert "".join(event.text for event in events if type(event) is Delta) == ""
    assert sum(event.tokens for event in events) == len(before + mark)


@pytest.mark.parametrize(("mark", "shown"), [("<", "<"), ("<tool_cal", "<tool_cal"), ("<tool_call>", "")])
def test_a_cut_text_keeps_an_end_that_may_be_no_call(mark: str, shown: str) -> None:
    reader = CallReader("g", tool_of=tool_of)
    events = [event for piece in ["a ", *mark] for event in reader.feed(Delta(piece, 1))]
    events += reader.end()
    assert "".join(event.text for event in events) == "a " + shown
    assert sum(event.tokens for event in events) == 1 + len(mark)


@pytest.mark.parametrize("cut", range(0, len(A + B), 7))
def test_a_resumed_answer_goes_on_with_the_same_call(cut: int) -> None:
    whole = A + B
    first, second = CallReader("g", tool_of=tool_of), CallReader("g", tool_of=tool_of)
    fold = AnswerFold()
    for event in first.feed(Delta(whole[:cut], 1)):
        fold.take(event)
    second.feed(Delta(whole[:cut], 0))
    for event in second.feed(Delta(whole[cut:], 1)):
        fold.take(event)
    ids = [call.id for call in fold.tool_calls()]
    assert [(call.name, call.arguments) for call in fold.tool_calls()] == read([whole])[1]
    assert len(set(ids)) == 2 and all(isinstance(call, ToolCall) for call in fold.tool_calls())
