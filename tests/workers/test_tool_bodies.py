"""The tools that workers are sent: the caller's own, unchanged, as in OpenAI's chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from budgeting.template_input import shown_tools
from budgeting.values import ImageContent, Message, Role, Tool, ToolKind
from gateway.backends.port import Continue
from gateway.backends.workers.client import Upload
from gateway.backends.workers.dialect import CHAT_PATH, FEATURES, Dialect
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.tools import canonical_json
from gateway.contracts.values import Caller, CallerRole
from tests.workers.raw_worker import make_writer, work

ORIGIN = RequestOrigin(
    request_id="req",
    generation_id="gen_1",
    caller=Caller("acme", CallerRole.CALLER, "key_1"),
    arrived_at=0.0,
    created=0,
    trace_id="a" * 32,
)
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "stock", "description": "?", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "bare"}},
    {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}},
]  # fmt: skip
HISTORY: list[Any] = [
    {"role": "user", "content": "Is it there?", "name": "bob"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"title":  "B"}'}},
            {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c2", "content": ""},
]
CHOICES: list[Any] = [
    "none",
    "auto",
    "required",
    {"type": "function", "function": {"name": "stock"}},
    {"type": "custom", "custom": {"name": "patch"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "stock"}}]},
    },
]


def forwarded(dialect: Dialect = Dialect.OPENAI, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": HISTORY, **fields}
    request = OpenAIDialect(chat=True).parse(json.dumps(body).encode(), ORIGIN).request
    sent = work(
        messages=request.messages,
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning_effort,
        template_kwargs=request.template_kwargs,
    )
    return json.loads(make_writer("base", dialect).write(sent).body)  # type: ignore[no-any-return]


@pytest.mark.parametrize("choice", CHOICES)
def test_tools_choices_and_histories_go_on_as_they_came(choice: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "reasoning_effort": "low"}
    sent = forwarded(**fields)
    assert {name: sent[name] for name in fields} == fields
    assert sent["messages"] == HISTORY


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_vllm_which_knows_no_allowed_tools_gets_no_others(mode: str) -> None:
    allowed = [
        {"type": "function", "function": {"name": "stock"}},
        {"type": "custom", "custom": {"name": "patch"}},
    ]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    sent = forwarded(Dialect.VLLM, tools=TOOLS, tool_choice=choice)
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["stock", "patch"]
    assert sent["tool_choice"] == mode
    assert Feature.ALLOWED_TOOLS in FEATURES[Dialect.VLLM]


def test_a_custom_tool_is_a_strict_function_of_one_text_as_the_template_is_shown_it() -> None:
    form = {"type": "grammar", "grammar": {"definition": "start: WORD", "syntax": "lark"}}
    custom = {"type": "custom", "custom": {"name": "patch", "description": "Edits a file.", "format": form}}
    [sent] = forwarded(Dialect.VLLM, tools=[custom])["tools"]
    assert "start: WORD" in sent["function"]["description"]
    assert sent["type"] == "function" and sent["function"]["strict"] is True
    assert sent["function"]["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    tool = Tool("patch", ToolKind.CUSTOM, "Edits a file.", format=canonical_json(form))
    assert shown_tools((tool,)) == [sent]


def test_a_request_without_tools_has_none_of_their_fields() -> None:
    body = json.loads(make_writer("base").write(work()).body)
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert not {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"} & set(body)


@pytest.mark.parametrize(
    ("dialect", "field"), [(Dialect.VLLM, "reasoning"), (Dialect.SLUICE, "reasoning"), (Dialect.OPENAI, None)]
)
def test_reasoning_in_the_history_goes_to_workers_that_take_it(dialect: Dialect, field: str | None) -> None:
    history = [HISTORY[0], {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}, HISTORY[0]]
    answer = forwarded(dialect, messages=history)["messages"][1]
    assert answer == {"role": "assistant", "content": "Yes", **({field: "hm"} if field else {})}


async def test_images_go_on_as_data_urls_in_their_places() -> None:
    parts = ("Is this", ImageContent(detail="low", sha256="a"), "or this?", ImageContent(sha256="b"))
    sent = work(
        messages=(
            Message(Role.USER, "Is thisor this?", parts=parts),
            Message(Role.TOOL, "", tool_call_id="c1", parts=parts[3:]),
        ),
        images={
            "a": ImageData("image/png", memoryview(b"a")),
            "b": ImageData("image/gif", memoryview(b"Yg=="), in_base64=True),
        },
    )
    for dialect in Dialect:
        upload = make_writer("base", dialect).write(sent).body
        assert isinstance(upload, Upload)
        body = b"".join([bytes(piece) async for piece in upload.pieces()])
        assert (len(body), upload.content_type) == (upload.length, b"application/json")
        message, result = json.loads(body)["messages"]
        assert result == {"role": "tool", "tool_call_id": "c1", "content": message["content"][3:]}
        assert message["content"] == [
            {"type": "text", "text": "Is this"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ==", "detail": "low"}},
            {"type": "text", "text": "or this?"},
            {"type": "image_url", "image_url": {"url": "data:image/gif;base64,Yg=="}},
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"reasoning_effort": "low"},
        {"template_kwargs": {"enable_thinking": False}},
        {"tools": "some"},
        {"images": {"a": ImageData("image/png", memoryview(b""))}},
    ],
)
def test_a_request_that_needs_the_workers_own_parsers_is_sent_as_messages(changes: dict[str, Any]) -> None:
    writer = make_writer("base", token_ids=True)
    if "tools" in changes:
        body = {"model": "m", "messages": HISTORY, "tools": TOOLS[:2]}
        changes = {"tools": OpenAIDialect(chat=True).parse(json.dumps(body).encode(), ORIGIN).request.tools}
    assert writer.path(work()) != CHAT_PATH == writer.path(work(**changes))
    assert writer.ways(work(**changes)) == {Continue.TEXT}
    other = make_writer("base", Dialect.SLUICE, token_ids=True)
    assert other.ways(work(**changes)) == frozenset()
    ended = work(template_kwargs={"add_generation_prompt": False})
    assert writer.path(ended) == CHAT_PATH
    raw = work(messages=(), **changes)
    assert writer.path(raw) != CHAT_PATH


def test_a_history_of_calls_alone_may_go_as_token_ids() -> None:
    writer = make_writer("base", token_ids=True)
    result = Message(Role.TOOL, "3", tool_call_id="c1")
    assert writer.path(work(messages=(Message(Role.USER, "x"), result))) != CHAT_PATH
