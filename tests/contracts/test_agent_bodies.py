"""Chat bodies of the shapes that coding agents send, written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from budgeting.values import Message, Role, ToolCall
from gateway.contracts.openai_stream import OpenAIDialect
from tests.contracts.test_messages_requests import ORIGIN

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"filePath": {"type": "string"}, "offset": {"type": "number"}},
            "required": ["filePath"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"filePath":"a"}'}}
OPENCODE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are OpenCode."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "text"},
    ],
    "tools": [READ],
    "tool_choice": "auto",
    "max_tokens": 32_000,
}
CONTINUE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are in agent mode."},
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
        {"role": "assistant", "content": "I read.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "text"},
    ],
    "tools": [READ],
    "parallel_tool_calls": False,
    "max_tokens": 4096,
}
CLINE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {"role": "user", "content": [{"type": "text", "text": "<task>Fix it.</task>"}]},
        {"role": "assistant", "content": "<read_file><path>a</path></read_file>"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "[read_file] Result:"}, {"type": "text", "text": "x"}],
        },
    ],
    "temperature": 0,
}


@pytest.mark.parametrize("body", [OPENCODE, CONTINUE, CLINE], ids=["opencode", "continue", "cline"])
def test_an_agents_chat_is_taken_as_it_is(body: dict[str, Any]) -> None:
    sent = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, **body}
    asked = OpenAIDialect(chat=True).parse(json.dumps(sent).encode(), ORIGIN)
    assert asked.include_usage
    assert not asked.request.dropped
    assert not asked.request.extra
    roles = [Role(one["role"]) for one in body["messages"]]
    assert [one.role for one in asked.request.messages] == roles
    if "tools" in body:
        call = ToolCall("call_1", "read", '{"filePath":"a"}')
        assert asked.request.messages[2].tool_calls == (call,)
        assert asked.request.messages[3] == Message(Role.TOOL, "text", tool_call_id="call_1")
        assert [one.name for one in asked.request.tools] == ["read"]
