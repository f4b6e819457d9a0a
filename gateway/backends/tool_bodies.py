"""Tools, tool choices and past calls in the form of OpenAI's chats; their texts are unchanged."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import structs

from budgeting.template import split_ending
from budgeting.template_input import as_function
from budgeting.values import (
    AudioContent,
    ImageContent,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
    ToolKind,
)
from gateway.backends.custom_input import wrapped
from gateway.backends.port import Work
from gateway.contracts.images import ImageData
from gateway.contracts.values import FormatType

NO_IMAGES: Final[Mapping[str, ImageData]] = {}
_MARK: Final = "\0"  # marks the place of an image; JSON cannot contain this byte


def message_body(
    message: Message,
    *,
    reasoning: str | None,
    custom: bool = True,
    images: Mapping[str, ImageData] = NO_IMAGES,
) -> dict[str, Any]:
    """The body of a message that has more than role and content.

    Args:
        reasoning: the worker's name of the field for reasoning, if it has one.
        custom: whether the worker knows custom tools; else they are sent as functions with one argument.
        images: by the hash of their bytes. An image's URL gets a mark, which :func:`parts_of_body` finds.
    """
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        body["content"] = [_part(part, images) for part in message.parts]
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [_call(call, custom=custom) for call in message.tool_calls]
    if reasoning is not None and message.reasoning is not None:
        body[reasoning] = message.reasoning
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def _part(part: str | ImageContent | AudioContent, images: Mapping[str, ImageData]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, AudioContent):
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": part.format}}
    detail = {} if part.detail is None else {"detail": part.detail}
    mark = f'"data:{images[part.sha256].media_type};base64,{_MARK}{part.sha256}{_MARK}"'
    return {"type": "image_url", "image_url": {"url": orjson.Fragment(mark), **detail}}


def parts_of_body(body: bytes, images: Mapping[str, ImageData]) -> Sequence[bytes | ImageData]:
    """Split a body at its image marks: its texts, and between them the images whose base64 goes there."""
    parts = body.split(_MARK.encode())
    return [images[part.decode()] if number % 2 else part for number, part in enumerate(parts)]


def tool_fields(work: Work, *, custom: bool = True) -> dict[str, Any]:
    """The fields of a body for tools, reasoning effort and template variables.

    ``custom``: whether the worker knows custom tools, and a choice of allowed ones; else each custom tool is
    written as a function with one argument, and the worker gets the allowed tools alone.
    """
    fields: dict[str, Any] = {}
    if not custom:
        work = with_allowed_tools(work)
    if work.tools:
        fields["tools"] = tool_bodies(work.tools, custom=custom)
        if work.tool_choice is not None:
            kinds = {one.name: one.kind if custom else ToolKind.FUNCTION for one in work.tools}
            fields["tool_choice"] = _choice(work.tool_choice, kinds)
        if work.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = work.parallel_tool_calls
    if work.reasoning_effort is not None:
        fields["reasoning_effort"] = work.reasoning_effort
    if work.template_kwargs:
        ending, variables = split_ending(work.template_kwargs)
        if variables:
            fields["chat_template_kwargs"] = variables
        fields |= ending
    return fields


def with_allowed_tools(work: Work) -> Work:
    """The work without the tools that may not be called, for a server that does not know such a choice."""
    choice = work.tool_choice
    if choice is None or not choice.allowed:
        return work
    tools = tuple([tool for tool in work.tools if tool.name in choice.allowed])
    return structs.replace(work, tools=tools, tool_choice=ToolChoice(choice.mode))


def form_warnings(work: Work) -> tuple[str, ...]:
    """What to tell the caller if a server applies the form of the answer to calls as well."""
    optional = work.tool_choice is None or work.tool_choice.mode is ToolChoiceMode.AUTO
    if not (work.tools and optional) or work.response_format.type is FormatType.TEXT:
        return ()
    return ("response_format may cover the whole answer on vLLM, so that no tool can be called",)


def tool_bodies(tools: Sequence[Tool], *, custom: bool) -> list[dict[str, Any]]:
    """The list of tools; ``custom`` as in :func:`tool_fields`."""
    return [_tool(one if custom else as_function(one)) for one in tools]


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


def _call(call: ToolCall, *, custom: bool) -> dict[str, Any]:
    if not custom and call.kind is ToolKind.CUSTOM:
        call = ToolCall(call.id, call.name, wrapped(call.arguments))
    text = "arguments" if call.kind is ToolKind.FUNCTION else "input"
    return {"id": call.id, "type": call.kind, call.kind.value: {"name": call.name, text: call.arguments}}


def _choice(choice: ToolChoice, kinds: dict[str, ToolKind]) -> str | dict[str, Any]:
    def named(name: str) -> dict[str, Any]:
        return {"type": kinds[name], kinds[name].value: {"name": name}}

    if choice.allowed:
        allowed = {"mode": choice.mode, "tools": [named(name) for name in choice.allowed]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice.mode.value if choice.name is None else named(choice.name)
