"""Converts the items and tools of ``/v1/responses`` to messages and tools."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from pydantic import ValidationError
from pydantic_core import from_json

from budgeting.values import ImageContent, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.images import made_of_parts
from gateway.contracts.refusals import first_refusal, not_allowed, path_of, required
from gateway.contracts.responses.body import (
    ChoiceObject,
    InputItem,
    ItemPart,
    NamedTool,
    PlainTool,
    ResponsesBody,
    ToolItem,
)
from gateway.contracts.tools import chosen_name, custom_tool, function_tool, refuse_others
from gateway.errors import InvalidRequest

NAMESPACE_JOINT = "__"  # separates a namespace and its member in the tool name that the model gets
SUMMARY_BEGINS = "Summary of our conversation so far:\n"
"""The begin of a compaction item's content, which is not encrypted: it is the caller's own conversation."""
OpenSeal = Callable[[str], str | None]
"""Returns the text of sealed reasoning; ``None`` if it was not sealed here for this tenant and model."""


def conversation(
    body: ResponsesBody, before: Sequence[InputItem], open_seal: OpenSeal | None
) -> Iterator[Message]:
    """The items as messages; an assistant's consecutive reasoning, text and calls are one message.

    Raises InvalidRequest: an item lacks a field, is the output of a call that is not before it, or is
    reasoning that has no readable content and cannot be opened, as without ``open_seal``.
    """
    if body.instructions:
        yield Message(Role.SYSTEM, body.instructions)
    own = body.input
    if isinstance(own, str):
        if not before:
            yield Message(Role.USER, own)
            return
        own = [InputItem(type="message", role="user", content=own)]
    turn, call_ids = _Turn(), set[str | None]()
    for index, item in enumerate((*before, *own), -len(before)):
        at = f"input.{index}" if index >= 0 else "previous_response_id"
        match item.type:
            case "reasoning":
                if turn.is_text:
                    yield turn.taken()
                turn.reasoning.append(reasoning_of(item, at, open_seal))
            case "item_reference":
                raise not_allowed(f"{at}.type", "is 'item_reference'", "the item itself")
            case "function_call" | "custom_tool_call":
                turn.calls.append(_call(item, at))
                call_ids.add(item.call_id)
            case "message" | "compaction" if item.type == "compaction" or item.role == "assistant":
                summary = item.type == "compaction"
                if turn.is_text or (summary and turn.calls):
                    yield turn.taken()
                text = _summary(item, at) if summary else _words(item.content, f"{at}.content")
                turn.content = (turn.content or "") + text
            case _:
                if turn:
                    yield turn.taken()
                if item.type != "message" and index >= 0 and item.call_id not in call_ids:
                    raise _without_call(item, at)
                yield _other(item, at)
    if turn:
        yield turn.taken()


class _Turn(Struct, eq=False):
    """Collects the items of an assistant's message."""

    reasoning: list[str] = []
    content: str | None = None
    calls: list[ToolCall] = []

    @property
    def is_text(self) -> bool:
        """Whether it has a text and no calls. Calls wait for their results: what follows them is theirs."""
        return self.content is not None and not self.calls

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.calls) or self.content is not None

    def taken(self) -> Message:
        """Return the message, and begin the next one."""
        message = Message(
            Role.ASSISTANT,
            self.content or "",
            tool_calls=tuple(self.calls),
            reasoning="".join(self.reasoning) or None,
        )
        self.reasoning, self.content, self.calls = [], None, []
        return message


def _words(given: str | Sequence[ItemPart] | None, at: str) -> str:
    """The text of a content that may have no images."""
    words: list[str] = []
    for number, part in enumerate(_parts(given, at)):
        if isinstance(part, ImageContent):
            raise not_allowed(f"{at}.{number}.type", "is an image", "text, and images of users and tools")
        words.append(part)
    return "".join(words)


def _parts(given: str | Sequence[ItemPart] | None, at: str) -> list[str | ImageContent]:
    if isinstance(given, str):
        return [given]
    return [
        ImageContent(required(part.image_url, f"{where}.image_url"), part.detail, f"{where}.image_url")
        if part.type == "input_image"
        else required(part.refusal, f"{where}.refusal")
        if part.type == "refusal"
        else required(part.text, f"{where}.text")
        for where, part in ((f"{at}.{number}", part) for number, part in enumerate(required(given, at)))
    ]


def stored_item(item: Mapping[str, Any], param: str) -> InputItem:
    """An item of a stored response, which the request's field ``param`` asks for.

    Raises InvalidRequest if it is no input: a model may write a null character.
    """
    try:
        return InputItem.model_validate(dict(item))
    except ValidationError as error:
        problem = first_refusal(error.errors(include_url=False)).message
        raise InvalidRequest(f"{param}: a stored item is no input: {problem}", param=param) from None


def reasoning_of(item: InputItem, at: str, open_seal: OpenSeal | None) -> str:
    """An item's reasoning. The sealed text takes precedence, since clients shorten or drop the content."""
    sealed = item.encrypted_content
    if sealed and open_seal is not None and (text := open_seal(sealed)) is not None:
        return text
    words = _words(item.content or (), f"{at}.content") or _words(item.summary or (), f"{at}.summary")
    if sealed and not words:
        raise not_allowed(
            f"{at}.encrypted_content",
            "was not sealed here for this tenant and model",
            "reasoning with its content",
        )
    return words


def _summary(item: InputItem, at: str) -> str:
    summary = required(item.encrypted_content, f"{at}.encrypted_content")
    if not summary.startswith(SUMMARY_BEGINS):
        raise not_allowed(
            f"{at}.encrypted_content", "was not made here", "that of POST /v1/responses/compact"
        )
    return summary


def _call(item: InputItem, at: str) -> ToolCall:
    call_id, name = required(item.call_id, f"{at}.call_id"), required(item.name, f"{at}.name")
    if item.namespace is not None:
        name = f"{item.namespace}{NAMESPACE_JOINT}{name}"
    if item.type == "function_call":
        arguments = required(item.arguments, f"{at}.arguments")
        # Bedrock and vLLM refuse a conversation with half of a call's arguments.
        return ToolCall(call_id, name, _whole(arguments) if item.is_incomplete else arguments)
    return ToolCall(call_id, name, required(item.input, f"{at}.input"), ToolKind.CUSTOM)


def _whole(arguments: str) -> str:
    """The arguments if they are an object; else an empty one, which chat templates get for them as well."""
    try:
        is_object = isinstance(from_json(arguments, allow_inf_nan=False), dict)
    except ValueError:
        is_object = False
    return arguments if is_object else "{}"


def _without_call(item: InputItem, at: str) -> InvalidRequest:
    call_id = required(item.call_id, f"{at}.call_id")
    allowed = "that of a call before it, in the input or in the conversation of previous_response_id"
    return not_allowed(f"{at}.call_id", f"is '{path_of([call_id])}'", allowed)


def _other(item: InputItem, at: str) -> Message:
    if item.type != "message":
        call_id = required(item.call_id, f"{at}.call_id")
        return made_of_parts(_parts(item.output, f"{at}.output"), Role.TOOL, call_id)
    role = required(item.role, f"{at}.role")
    if role == "user":
        return made_of_parts(_parts(item.content, f"{at}.content"))
    content = _words(item.content, f"{at}.content")
    return Message(Role.SYSTEM if role == "developer" else Role(role), content)


def flat_tools(
    tools: Sequence[ToolItem], namespaces: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, Tool]]:
    """Each tool and its path; the namespace is a prefix of its members' names. Fills ``namespaces``."""
    for index, tool in enumerate(tools):
        at = f"tools.{index}"
        if tool.type != "namespace":
            yield at, _tool(tool, tool.name, at)
            continue
        for number, member in enumerate(required(tool.tools, f"{at}.tools")):
            name = f"{tool.name}{NAMESPACE_JOINT}{member.name}"
            namespaces[name] = (tool.name, member.name)
            yield f"{at}.tools.{number}", _tool(member, name, f"{at}.tools.{number}")


def _tool(tool: PlainTool, name: str, at: str) -> Tool:
    if tool.type == "function":
        return function_tool(name, tool.description, tool.parameters, tool.strict, f"{at}.parameters")
    form = tool.format
    if form is not None and form.get("type") == "grammar" and "grammar" not in form:
        # Chats, the form that workers get, have the grammar's fields in an object of their own.
        form = {"type": "grammar", "grammar": {key: form[key] for key in form if key != "type"}}
    return custom_tool(name, tool.description, form, f"{at}.format")


def chosen(given: ChoiceObject, tools: Sequence[Tool]) -> ToolChoice:
    """The tool choice. Raises InvalidRequest: it names a tool that the request does not have."""
    if given.type == "allowed_tools":
        refuse_others(given, "mode", "tools")
        named = required(given.tools, "tool_choice.tools")
        names = tuple(_known(one, f"tool_choice.tools.{index}", tools) for index, one in enumerate(named))
        return ToolChoice(ToolChoiceMode(given.mode), allowed=names)
    refuse_others(given, "name", "namespace")
    return ToolChoice(ToolChoiceMode.NAMED, _known(given, "tool_choice", tools))


def _known(given: NamedTool | ChoiceObject, at: str, tools: Sequence[Tool]) -> str:
    name = required(given.name, f"{at}.name")
    if given.namespace is not None:
        name = f"{given.namespace}{NAMESPACE_JOINT}{name}"
    return chosen_name(name, given.type, tools, f"{at}.name")
