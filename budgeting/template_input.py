"""The input of a chat template: messages and tools in the form that ``transformers`` and vLLM give it.

A call's arguments are an object (``{}`` where the text is not one, as in vLLM: a history with a broken call
can be continued). A custom tool is shown as a strict function with one text, ``input``: vLLM constrains the
calls of a strict function instead of only parsing them, so that the text is always found.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from budgeting.values import Message, Tool, ToolCall, ToolKind

CUSTOM_INPUT = "input"
CUSTOM_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_CUSTOM_JSON = json.dumps(CUSTOM_PARAMETERS, separators=(",", ":"))


def shown_message(message: Message) -> dict[str, Any]:
    """A message as an entry of the template's variable ``messages``."""
    shown: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [_shown_call(call) for call in message.tool_calls]
    if message.reasoning is not None:
        # A template reads one of these two names.
        shown |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shown["name"] = message.name
    return shown


class ShownTool(dict[str, Any]):
    """A tool as an entry of the template's variable ``tools``.

    ``texts`` is its JSON by its encoder: an agent's requests have the same tools, and ten of them take a
    third of a millisecond with indents.
    """

    def __init__(self, shown: Mapping[str, Any]) -> None:
        super().__init__(shown)
        self.texts: dict[json.JSONEncoder, str] = {}


class ShownTools(list[ShownTool]):
    """The template's variable ``tools``; ``texts`` as of each of them."""

    def __init__(self, shown: Iterable[ShownTool]) -> None:
        super().__init__(shown)
        self.texts: dict[json.JSONEncoder, str] = {}


def shown_tools(tools: Sequence[Tool]) -> ShownTools | None:
    """The template's variable ``tools``; ``None`` when there are none."""
    return ShownTools(map(_shown_tool, tools)) if tools else None


def as_function(tool: Tool) -> Tool:
    """A custom tool as a function; the description says the form of its input."""
    if tool.kind is ToolKind.FUNCTION:
        return tool
    form = f"The form of {CUSTOM_INPUT}: {tool.format}" if tool.has_grammar else ""
    description = "\n\n".join(filter(None, (tool.description, form))) or None
    return Tool(tool.name, ToolKind.FUNCTION, description, _CUSTOM_JSON, strict=True)


def _shown_tool(tool: Tool) -> ShownTool:
    tool = as_function(tool)
    parameters = None if tool.parameters is None else json.loads(tool.parameters)
    shown: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    if tool.strict is not None:
        shown["strict"] = tool.strict
    return ShownTool({"type": ToolKind.FUNCTION.value, "function": shown})


def _shown_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call)}
    return {"id": call.id, "type": ToolKind.FUNCTION.value, "function": function}


def _arguments(call: ToolCall) -> dict[str, Any]:
    if call.kind is ToolKind.CUSTOM:
        return {CUSTOM_INPUT: call.arguments}
    try:
        given = parsed_arguments(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def parsed_arguments(text: str) -> Any:
    """The arguments as a JSON value, with U+FFFD for half of a surrogate pair, which no tokenizer takes.

    Raises ValueError, RecursionError.
    """
    given = json.loads(text)
    return with_texts(given, _of_whole_characters) if "\\u" in text else given


def _of_whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def texts_in(value: object) -> Iterator[str]:
    """Every text of a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(inner, change) for inner in value]
    return value
