"""Tools, choices and histories of calls as OpenAI's chats have them; their texts unchanged."""

from typing import Any

import orjson

from budgeting.values import Message, Tool, ToolCall, ToolChoice, ToolKind
from gateway.backends.port import Work


def message_body(message: Message, *, reasoning: str | None) -> dict[str, Any]:
    """A message with more than role and content; ``reasoning`` is the worker's name of that field, if any."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [_call(call) for call in message.tool_calls]
    if reasoning is not None and message.reasoning is not None:
        body[reasoning] = message.reasoning
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def tool_fields(work: Work) -> dict[str, Any]:
    """The fields of a body that say which tools there are, and how the model thinks."""
    fields: dict[str, Any] = {}
    if work.tools:
        fields["tools"] = [_tool(tool) for tool in work.tools]
        if work.tool_choice is not None:
            fields["tool_choice"] = _choice(work.tool_choice, {tool.name: tool.kind for tool in work.tools})
        if work.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = work.parallel_tool_calls
    if work.reasoning_effort is not None:
        fields["reasoning_effort"] = work.reasoning_effort
    if work.template_kwargs:
        fields["chat_template_kwargs"] = work.template_kwargs
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    body: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        body["description"] = tool.description
    if tool.parameters is not None:
        body["parameters"] = orjson.Fragment(tool.parameters)
    if tool.strict is not None:
        body["strict"] = tool.strict
    if tool.format is not None:
        body["format"] = orjson.Fragment(tool.format)
    return {"type": tool.kind, tool.kind.value: body}


def _call(call: ToolCall) -> dict[str, Any]:
    text = "arguments" if call.kind is ToolKind.FUNCTION else "input"
    return {"id": call.id, "type": call.kind, call.kind.value: {"name": call.name, text: call.arguments}}


def _choice(choice: ToolChoice, kinds: dict[str, ToolKind]) -> str | dict[str, Any]:
    def named(name: str) -> dict[str, Any]:
        return {"type": kinds[name], kinds[name].value: {"name": name}}

    if choice.allowed:
        allowed = {"mode": choice.mode, "tools": [named(name) for name in choice.allowed]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice.mode.value if choice.name is None else named(choice.name)
