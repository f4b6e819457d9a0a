"""Converts Anthropic's blocks and tools to messages and tools."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NoReturn

from pydantic_core import to_json

from budgeting.values import ImageContent, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.images import join_messages, made_of_parts
from gateway.contracts.messages.answer import own_call_id
from gateway.contracts.messages.body import (
    BlockMessage,
    ContentBlock,
    CountRequest,
    ImageSource,
    InputTool,
    InputToolChoice,
    MessagesRequest,
)
from gateway.contracts.refusals import given_type, not_allowed, required
from gateway.contracts.tool_fields import MAX_CALLS
from gateway.contracts.tools import checked_tools, chosen_name, function_tool, to_choice

ATTRIBUTION: Final = "x-anthropic-billing-header"
"""Beginning of the system prompt's block with the client's session. The block is left out: it differs between
conversations, so no two of them would share a cached prefix."""

_GAP: Final = "\n\n"  # between the texts of consecutive turns
_MODES: Final[Mapping[str, ToolChoiceMode]] = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "none": ToolChoiceMode.NONE,
}


def conversation(body: CountRequest) -> tuple[Message, ...]:
    """The messages, the system prompt first.

    An instruction between the turns becomes a user's message at its place: at the front it would change the
    prefix that the turns before it share with the last request. Consecutive turns of one role are one, as at
    Anthropic. Raises InvalidRequest: a block that is not supported, or that lacks a field.
    """
    messages: list[Message] = []
    if system := _GAP.join(_system_texts(body.system, "system")):
        messages.append(Message(Role.SYSTEM, system))
    for role, group in groupby(_turns(body.messages), attrgetter("role")):
        turns = list(group)
        if role is Role.USER:
            turns = [join_messages(turns, _GAP)]
        messages += [_joined(turns)] if role is Role.ASSISTANT else turns
    if isinstance(body, MessagesRequest) or body.messages[-1].role != "assistant":  # it may be counted
        _check_latest(body.messages, messages)
    return tuple(messages)


def _turns(given: Sequence[BlockMessage]) -> Iterator[Message]:
    for index, one in enumerate(given):
        at = f"messages.{index}"
        if one.role == "assistant":
            yield _assistant(one, at)
        else:
            yield from _words_and_results(one, at)


def _check_latest(given: Sequence[BlockMessage], messages: Sequence[Message]) -> None:
    at = f"messages.{len(given) - 1}"
    if given[-1].role == "assistant":
        raise not_allowed(
            f"{at}.role", "is 'assistant', which cannot be continued", "'user' in the last message"
        )
    last = messages[-1] if messages else Message(Role.USER, "")
    # A turn without text has no message: the last one is then the turn before it, or the system prompt.
    asks = last.role is Role.USER and (last.content.strip() or last.parts)
    if last.role is not Role.TOOL and not asks:
        raise not_allowed(f"{at}.content", "is blank", "text or a tool_result in the last message")


def _texts(content: str | list[ContentBlock] | None, at: str) -> list[str]:
    """The texts of a content that may only have texts."""
    if isinstance(content, str):
        return [content]
    return [
        required(one.text, f"{at}.{number}.text")
        if one.type == "text"
        else _not_served(one, f"{at}.{number}", "'text'")
        for number, one in enumerate(content or ())
    ]


def _system_texts(content: str | list[ContentBlock] | None, at: str) -> list[str]:
    """The texts of a system prompt, without the client's attribution block."""
    return [text for text in _texts(content, at) if text and not text.startswith(ATTRIBUTION)]


def _words_and_results(message: BlockMessage, at: str) -> Iterator[Message]:
    """The messages of a user's turn: its tool results, right after their calls, then its texts and images."""
    at = f"{at}.content"
    if isinstance(message.content, str) or message.role == "system":
        read = _system_texts if message.role == "system" else _texts
        if text := "".join(read(message.content, at)):
            yield Message(Role.USER, text)
        return
    parts: list[str | ImageContent] = []
    for number, block in enumerate(message.content):
        where = f"{at}.{number}"
        if block.type == "text":
            parts.append(required(block.text, f"{where}.text"))
        elif block.type == "image":
            parts.append(_image(block, f"{where}.source"))
        elif block.type == "tool_result":
            yield _result(block, where)
        else:
            _not_served(block, where, "'text', 'image' or 'tool_result'")
    if any(parts):
        yield made_of_parts(parts)


def _image(block: ContentBlock, at: str) -> ImageContent:
    if isinstance(block.source, str):
        raise not_allowed(at, "is a string", "an object")
    source = required(block.source, at)
    if source.type == "url":
        return ImageContent(required(source.url, f"{at}.url"), param=f"{at}.url")
    if source.type != "base64":
        _not_served(source, at, "'base64' or 'url'")
    media_type = required(source.media_type, f"{at}.media_type")
    return ImageContent(f"data:{media_type};base64,{required(source.data, f'{at}.data')}", param=f"{at}.data")


def _result(block: ContentBlock, at: str) -> Message:
    """A tool's result; its text says that it is an error, since no chat template has a field for that."""
    given = block.content or ()
    parts: list[str | ImageContent] = [given] if isinstance(given, str) else []
    for number, one in enumerate(() if isinstance(given, str) else given):
        where = f"{at}.content.{number}"
        if one.type == "image":
            parts.append(_image(one, f"{where}.source"))
        elif one.type != "text":
            _not_served(one, where, "'text' or 'image'")
        elif text := required(one.text, f"{where}.text"):
            parts += ["\n", text] if parts and isinstance(parts[-1], str) else [text]
    first = parts[0] if parts and isinstance(parts[0], str) else ""
    if block.is_error and "error" not in first[:64].lower():
        parts.insert(0, "Error: ")
    return made_of_parts(parts, Role.TOOL, own_call_id(required(block.tool_use_id, f"{at}.tool_use_id")))


def _assistant(message: BlockMessage, at: str) -> Message:
    """A turn of the model. Its signatures may be from any model and are not checked."""
    if isinstance(message.content, str):
        return Message(Role.ASSISTANT, message.content)
    texts, reasoning, calls = [], [], []
    for number, block in enumerate(message.content):
        where = f"{at}.content.{number}"
        if block.type == "text":
            texts.append(required(block.text, f"{where}.text"))
        elif block.type == "thinking":
            reasoning.append(required(block.thinking, f"{where}.thinking"))
        elif block.type == "tool_use":
            calls.append(_call(block, where))
        elif block.type != "redacted_thinking":
            _not_served(block, where, "'text', 'tool_use', 'thinking' or 'redacted_thinking'")
    if len(calls) > MAX_CALLS:
        raise not_allowed(f"{at}.content", f"has {len(calls)} tool calls", f"{MAX_CALLS} or fewer")
    return Message(
        Role.ASSISTANT, "".join(texts), tool_calls=tuple(calls), reasoning="".join(reasoning) or None
    )


def _joined(turns: Sequence[Message]) -> Message:
    """Consecutive turns of the model as one: some chat templates refuse several."""
    return Message(
        Role.ASSISTANT,
        _GAP.join([one.content for one in turns if one.content]),
        tool_calls=tuple([call for one in turns for call in one.tool_calls]),
        reasoning=_GAP.join([one.reasoning for one in turns if one.reasoning]) or None,
    )


def _call(block: ContentBlock, at: str) -> ToolCall:
    arguments = required(block.input, f"{at}.input")
    call_id = own_call_id(required(block.id, f"{at}.id"))
    text = to_json(arguments, inf_nan_mode="null").decode()
    return ToolCall(call_id, required(block.name, f"{at}.name"), text)


def _not_served(block: ContentBlock | InputTool | ImageSource, at: str, allowed: str) -> NoReturn:
    raise not_allowed(f"{at}.type", f"is {given_type(block.type)}, which is not supported", allowed)


def input_tools(given: Sequence[InputTool]) -> tuple[Tool, ...]:
    """The tools, in the caller's order. Raises InvalidRequest: one that Anthropic runs, or a bad schema."""
    return checked_tools((f"tools.{index}", _tool(one, f"tools.{index}")) for index, one in enumerate(given))


def _tool(one: InputTool, at: str) -> Tool:
    if one.type not in (None, "custom"):
        _not_served(one, at, "'custom' or none")
    name, schema = required(one.name, f"{at}.name"), required(one.input_schema, f"{at}.input_schema")
    return function_tool(name, one.description, schema, one.strict, f"{at}.input_schema")


def chosen(given: InputToolChoice | None, tools: Sequence[Tool]) -> ToolChoice | None:
    """The tool choice. Raises InvalidRequest: it names a tool that the request does not have."""
    mode = given if given is None or given.type == "tool" else _MODES[given.type]
    return to_choice(mode, tools, _named)


def _named(given: InputToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    name = required(given.name, "tool_choice.name")
    return ToolChoice(ToolChoiceMode.NAMED, chosen_name(name, ToolKind.FUNCTION, tools, "tool_choice.name"))
