"""Tools, tool choices and histories of calls in both contracts: their internal form, bounds and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.values import Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.features import Feature
from gateway.contracts.messages.answer import shown_call_id
from gateway.contracts.messages.stream import MessagesDialect
from gateway.contracts.native_answer import NativeDialect
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.responses.stream import ResponsesDialect
from gateway.contracts.tool_fields import MAX_TOOLS
from gateway.contracts.tools import MAX_KWARGS, canonical_json
from gateway.contracts.values import Caller, CallerRole, GenerateRequest
from gateway.errors import GrammarTooComplex, InvalidRequest

ORIGIN = RequestOrigin(
    request_id="req_edge",
    generation_id="gen_1",
    caller=Caller("acme", CallerRole.CALLER, "key_1"),
    arrived_at=100.0,
    created=1_800_000_000,
    trace_id="a" * 32,
    max_messages=16,
)
SECRET = "the caller's private words"
TURN = {"role": "user", "content": SECRET}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
STOCK = {"type": "function", "function": {"name": "stock", "description": "In stock?", "parameters": SCHEMA}}
PATCH = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "stock", "arguments": '{"title": "B"}'}}
LOOP = [
    TURN,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "look"},
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]


def chat(**fields: Any) -> GenerateRequest:
    body = {"model": "demo", "messages": [TURN], **fields}
    return OpenAIDialect(chat=True).parse(json.dumps(body).encode(), ORIGIN).request


def native(**fields: Any) -> GenerateRequest:
    body = {"messages": [TURN], **fields}
    return NativeDialect().parse(json.dumps(body).encode(), ORIGIN).request


BOTH = pytest.mark.parametrize("parse", [chat, native])


@BOTH
def test_tools_and_a_history_of_calls_reach_the_inside_without_loss(parse: Any) -> None:
    request = parse(
        messages=LOOP,
        tools=[STOCK, PATCH],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
        chat_template_kwargs={"style": "short"},
    )
    assert request.messages[1:] == (
        Message(
            Role.ASSISTANT, "", (ToolCall("call_1", "stock", '{"title": "B"}'),), reasoning="look"
        ),
        Message(Role.TOOL, "3", tool_call_id="call_1"),
    )  # fmt: skip
    assert request.tools == (
        Tool("stock", description="In stock?", parameters=canonical_json(SCHEMA)),
        Tool("patch", ToolKind.CUSTOM, format='{"type":"text"}'),
    )
    assert request.tool_choice == ToolChoice(ToolChoiceMode.REQUIRED)
    assert request.parallel_tool_calls is False
    assert request.template_variables == {
        "reasoning_effort": "low",
        "enable_thinking": True,
        "style": "short",
    }
    assert request.needs == {
        Feature.TOOLS,
        Feature.CUSTOM_TOOLS,
        Feature.REASONING_EFFORT,
        Feature.TEMPLATE_KWARGS,
    }


def test_a_grammar_of_a_custom_tool_is_a_need_of_its_own() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    bound = {"type": "custom", "custom": {"name": "patch", "format": form}}
    assert chat(tools=[STOCK, bound]).needs == {Feature.TOOLS, Feature.CUSTOM_TOOLS, Feature.TOOL_GRAMMARS}


@BOTH
def test_a_history_of_calls_needs_a_backend_that_knows_tools(parse: Any) -> None:
    assert parse(messages=LOOP).needs == {Feature.TOOLS}
    assert parse().needs == frozenset()
    assert parse(reasoning_effort="none").needs == frozenset()
    assert parse(reasoning_effort="none").template_variables["enable_thinking"] is False
    own = {"enable_thinking": True}
    assert parse(reasoning_effort="none", chat_template_kwargs=own).template_variables["enable_thinking"]


@pytest.mark.parametrize(
    ("choice", "inside"),
    [
        ("none", ToolChoice(ToolChoiceMode.NONE)),
        ("auto", ToolChoice(ToolChoiceMode.AUTO)),
        ({"type": "function", "function": {"name": "stock"}}, ToolChoice(ToolChoiceMode.NAMED, "stock")),
        ({"type": "custom", "custom": {"name": "patch"}}, ToolChoice(ToolChoiceMode.NAMED, "patch")),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "stock"}}],
                },
            },
            ToolChoice(ToolChoiceMode.REQUIRED, allowed=("stock",)),
        ),
        (None, None),
    ],
)
def test_every_form_of_a_choice_is_one_value(choice: Any, inside: ToolChoice | None) -> None:
    request = chat(tools=[STOCK, PATCH], tool_choice=choice)
    assert request.tool_choice == inside
    assert (Feature.ALLOWED_TOOLS in request.needs) is bool(inside and inside.allowed)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


ASSISTANT = {"role": "assistant", "content": "x"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a tool of no kind", {"tools": [{}]}, "tools.0.type"),
    ("a foreign kind", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ("no function", {"tools": [{"type": "function"}]}, "tools.0.function"),
    ("no custom", {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.custom"),
    ("no name", {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ("a long name", {"tools": [named("f" * 129)]}, "tools.0.function.name"),
    ("a name twice", {"tools": [named("f"), named("f")]}, "tools.1.function.name"),
    ("an unknown field", {"tools": function(mood=1)}, "tools.0.function.mood"),
    ("no schema", {"tools": function(parameters=5)}, "tools.0.function.parameters"),
    (
        "a text as arguments",
        {"tools": function(parameters={"type": "string"})},
        "tools.0.function.parameters",
    ),
    (
        "a list as arguments",
        {"tools": function(parameters={"type": ["array", "null"]})},
        "tools.0.function.parameters",
    ),
    ("too deep", {"tools": function(parameters=deep(40))}, "tools.0.function.parameters"),
    ("too long", {"tools": function(parameters={"const": "x" * 70_000})}, "tools.0.function.parameters"),
    (
        "too many properties",
        {"tools": function(parameters={"properties": {f"p{n}": {} for n in range(5_001)}})},
        "tools.0.function.parameters",
    ),
    (
        "too much together",
        {
            "tools": [
                {"type": "function", "function": {"name": f"f{n}", "description": "x" * 60_000}}
                for n in range(9)
            ]
        },
        "tools",
    ),
    ("too many", {"tools": [named(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools"),
    ("a choice without tools", {"tool_choice": "required"}, "tool_choice"),
    ("a name without tools", {"tool_choice": named("f")}, "tool_choice"),
    ("an unknown name", {"tools": [STOCK], "tool_choice": named("g")}, "tool_choice.function.name"),
    (
        "a field of another type",
        {"tools": [STOCK], "tool_choice": {**named("stock"), "custom": {"name": "stock"}}},
        "tool_choice.custom",
    ),
    ("a foreign choice", {"tools": [STOCK], "tool_choice": "maybe"}, "tool_choice"),
    (
        "an unknown allowed name",
        {
            "tools": [STOCK],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [named("stock"), named("g")]},
            },
        },
        "tool_choice.allowed_tools.tools.1.function.name",
    ),
    ("calls of a user", {"messages": [{**TURN, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ("no id of a result", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ("a user's result", {"messages": [{**TURN, "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
    (
        "a call of nothing",
        {"messages": [{**ASSISTANT, "tool_calls": [{"id": "c", "type": "function"}]}, TURN]},
        "messages.0.tool_calls.0.function",
    ),
    (
        "arguments that are no text",
        {
            "messages": [
                {
                    **ASSISTANT,
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}],
                },
                TURN,
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
    ),
    ("no content", {"messages": [{"role": "user"}]}, "messages.0.content"),
    ("an unknown effort", {"reasoning_effort": "highest"}, "reasoning_effort"),
    ("a reserved variable", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ("a special token", {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    ("a variable of no name", {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b"),
    (
        "too many variables",
        {"chat_template_kwargs": {f"a{n}": 1 for n in range(MAX_KWARGS + 1)}},
        "chat_template_kwargs",
    ),
    ("long variables", {"chat_template_kwargs": {"a": "x" * 9_000}}, "chat_template_kwargs"),
]


@BOTH
@pytest.mark.parametrize(("fields", "param"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_an_invalid_tool_field_is_refused_by_its_path(parse: Any, fields: Any, param: str) -> None:
    with pytest.raises((InvalidRequest, GrammarTooComplex)) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert SECRET not in refused.value.message


@BOTH
@pytest.mark.parametrize(
    ("kind", "shown"), [("web_search", "'web_search'"), (SECRET, "a string of 26 characters"), (5, "5")]
)
def test_a_tool_that_is_not_supported_is_named_by_its_type(parse: Any, kind: object, shown: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(tools=[{"type": kind}])
    assert refused.value.message == f"tools.0.type is {shown}; allowed: 'function' or 'custom'"


def test_a_schema_has_one_text_whatever_the_order_of_its_keywords() -> None:
    one = {
        "required": ["b", "a"],
        "properties": {"b": {"enum": [1], "type": "integer"}, "a": {}},
        "type": "object",
    }
    other = {
        "type": "object",
        "properties": {"b": {"type": "integer", "enum": [1]}, "a": {}},
        "required": ["b", "a"],
    }
    assert canonical_json(one) == canonical_json(other)
    assert chat(tools=function(parameters=one)).tools == chat(tools=function(parameters=other)).tools
    assert canonical_json(one).index('"b":') < canonical_json(one).index('"a":')
    swapped = {**other, "properties": {"a": {}, "b": {"type": "integer", "enum": [1]}}}
    assert canonical_json(swapped) != canonical_json(one)
    of_its_name = {"properties": {"properties": {"z": 1, "type": "object"}}}
    assert canonical_json(of_its_name) == '{"properties":{"properties":{"type":"object","z":1}}}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "properties", "enum", "a", "$defs"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["type", "properties", "required", "b"]), JSON, max_size=4))
def test_a_canonical_schema_means_what_was_given(schema: dict[str, Any]) -> None:
    text = canonical_json(schema)
    assert json.loads(text) == schema
    assert canonical_json(json.loads(text)) == text


def test_text_parts_of_a_result_are_one_text_and_names_are_kept() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3 left"}]}
    request = chat(messages=[{**TURN, "name": "bob"}, LOOP[1], result])
    assert request.messages[0] == Message(Role.USER, SECRET, name="bob")
    assert request.messages[2].content == "3 left"


def messages(call_id: str, name: str = "stock") -> GenerateRequest:
    called = {"type": "tool_use", "id": shown_call_id(call_id), "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": shown_call_id(call_id), "content": "3"}
    turns = [
        TURN,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]
    body = json.dumps({"model": "demo", "max_tokens": 9, "messages": turns})
    return MessagesDialect().parse(body.encode(), ORIGIN).request


def responses(call_id: str, name: str = "stock") -> GenerateRequest:
    called = {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": call_id, "output": "3"}
    body = json.dumps({"model": "demo", "input": [TURN, called, result]})
    return ResponsesDialect().parse(body.encode(), ORIGIN).request


def loop(call_id: str, name: str = "stock") -> list[Any]:
    called = {**CALL, "id": call_id, "function": {"name": name, "arguments": "{}"}}
    result = {**LOOP[2], "tool_call_id": call_id, "name": name}
    return [TURN, {**LOOP[1], "tool_calls": [called]}, result]


EACH = pytest.mark.parametrize(
    "parse",
    [
        lambda *call: chat(messages=loop(*call)),
        lambda *call: native(messages=loop(*call)),
        messages,
        responses,
    ],
    ids=["chat", "native", "messages", "responses"],
)


@EACH
def test_a_call_comes_back_with_the_id_in_which_its_worker_keeps_a_thoughts_signature(parse: Any) -> None:
    given = f"call_7f3a__thought__{'Ab+/' * 1_000}=="
    _, called, result = parse(given).messages
    assert called.tool_calls[0].id == result.tool_call_id == given


@pytest.mark.parametrize("name", ["Look it up:\n" * 20, "\t", "x" * 129], ids=["lines", "blank", "long"])
@EACH
def test_a_call_comes_back_with_the_name_that_the_model_made_up(parse: Any, name: str) -> None:
    _, called, _ = parse("call_1", name).messages
    assert called.tool_calls[0].name == name
