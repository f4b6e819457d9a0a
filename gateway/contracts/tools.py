"""Converts the tools, tool choices and tool calls of request bodies to internal values, within bounds.

A schema is written as canonical JSON: without blanks, with keywords in a fixed order. Names of properties
keep the caller's order, since a model writes arguments in that order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from sys import getsizeof
from typing import Any, Final, TypeVar

import orjson
from pydantic_core import to_json

from budgeting.template import CONTINUES, GENERATES, RESERVED
from budgeting.token_cache import TokenCache
from budgeting.values import Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.checks import check_plain
from gateway.contracts.features import Feature
from gateway.contracts.fields import MAX_NAME, Body
from gateway.contracts.formats import bounded_schema
from gateway.contracts.refusals import not_allowed, path_of, required
from gateway.contracts.tool_fields import (
    CallFields,
    HistoryCall,
    ToolBody,
    ToolChoiceBody,
    ToolFields,
    ToolReference,
)
from gateway.contracts.values import EMPTY
from gateway.errors import InvalidRequest

T = TypeVar("T")
_calls: Final = attrgetter("tool_calls")
_call_id: Final = attrgetter("tool_call_id")
MAX_TOOLS_CHARS: Final = 524_288
"""Most characters of all tools' descriptions and schemas together: eight of the largest schemas."""
_schema_texts: Final = TokenCache[str](8 * 1024 * 1024)
MAX_KWARGS: Final = 32  # most variables of ``chat_template_kwargs``
MAX_KWARGS_CHARS: Final = 8_192
"""Most characters of the JSON of ``chat_template_kwargs``; the chat template gets it with every request."""


def tool_request(body: ToolFields, *, in_history: bool) -> tuple[dict[str, Any], frozenset[Feature]]:
    """A body's tool fields as fields of a request, and the features that a backend needs for them.

    ``in_history``: messages have tool calls or results. Raises InvalidRequest: a rule types cannot express.
    """
    if not (
        in_history or body.tools or body.tool_choice or body.reasoning_effort or body.chat_template_kwargs
    ):
        return {}, frozenset()
    tools = to_tools(body.tools or ())
    return asked_tools(
        tools,
        to_choice(body.tool_choice, tools, _chosen),
        parallel=body.parallel_tool_calls,
        effort=body.reasoning_effort,
        kwargs=template_kwargs(body.chat_template_kwargs),
        in_history=in_history,
    )


def asked_tools(
    tools: tuple[Tool, ...],
    choice: ToolChoice | None,
    *,
    parallel: bool | None,
    effort: str | None,
    kwargs: Mapping[str, Any] = EMPTY,
    in_history: bool,
) -> tuple[dict[str, Any], frozenset[Feature]]:
    """The tool fields of a request of any contract, and the features that a backend needs for them."""
    asked = {
        Feature.TOOLS: bool(tools) or in_history,
        Feature.CUSTOM_TOOLS: any(tool.kind is ToolKind.CUSTOM for tool in tools),
        Feature.TOOL_GRAMMARS: any(tool.has_grammar for tool in tools),
        Feature.ALLOWED_TOOLS: choice is not None and bool(choice.allowed),
        Feature.REASONING_EFFORT: effort not in (None, "none"),
        Feature.TEMPLATE_KWARGS: bool(kwargs),
    }
    own = {
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel if tools else None,
        "reasoning_effort": effort,
        "template_kwargs": kwargs,
    }
    return own, frozenset(feature for feature, is_asked in asked.items() if is_asked)


def to_tools(bodies: Sequence[ToolBody]) -> tuple[Tool, ...]:
    """The tools, in the caller's order. Raises InvalidRequest: a schema, a repeated name, too much text."""
    return checked_tools(_placed(one, f"tools.{index}.{one.type}") for index, one in enumerate(bodies))


def _placed(one: ToolBody, at: str) -> tuple[str, Tool]:
    if one.type == "function":
        own = required(one.function, at)
        return at, function_tool(own.name, own.description, own.parameters, own.strict, f"{at}.parameters")
    form = required(one.custom, at)
    return at, custom_tool(form.name, form.description, form.format, f"{at}.format")


def function_tool(
    name: str, description: str | None, schema: Mapping[str, Any] | None, strict: bool | None, at: str
) -> Tool:
    """A function; its schema is the body's field ``at``.

    Raises InvalidRequest: the schema is too large, or excludes an object, which a call's arguments are.
    """
    kinds = None if schema is None else schema.get("type")
    if kinds is not None and "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise not_allowed(at, "has another type than object", "the type object, or none")
    text = None if schema is None else _schema_text(schema, at)
    return Tool(name, ToolKind.FUNCTION, description, text, strict)


def _schema_text(schema: Mapping[str, Any], at: str) -> str:
    """The schema as canonical JSON, made once for equal ones: an agent sends its tools with every request."""
    try:
        given = to_json(schema, inf_nan_mode="constants")
    except ValueError:  # too deep
        return canonical_json(bounded_schema(schema, at))
    text = _schema_texts.get(given)
    if text is None:
        text = canonical_json(bounded_schema(schema, at))
        _schema_texts.put(given, text, getsizeof(given) + getsizeof(text))
    return text


def custom_tool(name: str, description: str | None, form: Mapping[str, Any] | None, at: str) -> Tool:
    """A custom tool; the form of its input is the body's field ``at``."""
    if form is not None:
        check_plain(form, at)
    return Tool(name, ToolKind.CUSTOM, description, format=None if form is None else canonical_json(form))


def checked_tools(placed: Iterable[tuple[str, Tool]]) -> tuple[Tool, ...]:
    """The tools, given with their paths. Raises InvalidRequest: a repeated or long name, or too much text."""
    tools: dict[str, Tool] = {}
    chars = 0
    for at, tool in placed:
        if tool.name in tools:
            raise not_allowed(f"{at}.name", "is also the name of another tool", "each name once")
        if len(tool.name) > MAX_NAME:  # with its namespace
            raise not_allowed(f"{at}.name", f"has {len(tool.name)} characters", f"{MAX_NAME} or fewer")
        tools[tool.name] = tool
        chars += len(tool.parameters or "") + len(tool.format or "") + len(tool.description or "")
        if chars > MAX_TOOLS_CHARS:
            raise not_allowed("tools", f"has more than {MAX_TOOLS_CHARS} characters", f"{MAX_TOOLS_CHARS}")
    return tuple(tools.values())


def to_calls(bodies: Sequence[HistoryCall], at: str) -> tuple[ToolCall, ...]:
    """The calls of a message; ``at`` is the path of its ``tool_calls``. Raises InvalidRequest."""
    calls = []
    for index, one in enumerate(bodies):
        if one.type == "function":
            function = required(one.function, f"{at}.{index}.function")
            calls.append(ToolCall(one.id, function.name, function.arguments or ""))
        else:
            custom = required(one.custom, f"{at}.{index}.custom")
            calls.append(ToolCall(one.id, custom.name, custom.input, ToolKind.CUSTOM))
    return tuple(calls)


def template_kwargs(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The caller's variables for the chat template. Raises InvalidRequest: a reserved name, or too much."""
    if not given:
        return EMPTY
    field = "chat_template_kwargs"
    check_plain(given, field)
    for name in given:
        if name in RESERVED or name.endswith("_token") or not name.isidentifier():
            path = path_of((field, name))
            raise not_allowed(
                path, "is a variable that callers may not set", "names that the chat template defines"
            )
    if len(given) > MAX_KWARGS:
        raise not_allowed(field, f"has {len(given)} fields", f"{MAX_KWARGS} or fewer")
    if (size := len(orjson.dumps(given))) > MAX_KWARGS_CHARS:
        raise not_allowed(field, f"has {size} characters", f"{MAX_KWARGS_CHARS} or fewer")
    return given


def chat_ending(*, continues: bool | None, generates: bool | None) -> Mapping[str, Any]:
    """vLLM's fields for how the prompt ends; empty for the default, the prompt for an answer.

    Raises InvalidRequest: both are true.
    """
    if continues and generates:
        raise not_allowed(GENERATES, f"is true with {CONTINUES}", f"false, or {CONTINUES} false")
    if continues:
        return {CONTINUES: True, GENERATES: False}
    return EMPTY if generates is not False else {GENERATES: False}


def chosen_name(name: str, kind: str, tools: Sequence[Tool], param: str) -> str:
    """The name of a tool. Raises InvalidRequest: no tool of the request has that name and kind."""
    if not any(tool.name == name and tool.kind == kind for tool in tools):
        raise not_allowed(param, "is not the name of a tool", "a name in tools")
    return name


def to_choice(
    given: str | T | None, tools: Sequence[Tool], from_object: Callable[[T, Sequence[Tool]], ToolChoice]
) -> ToolChoice | None:
    """The tool choice, given as a mode or as an object. Raises InvalidRequest: it is given without tools."""
    if given is None or isinstance(given, str):
        return to_mode(given, tools)
    _require(tools)
    return from_object(given, tools)


def to_mode(given: str | None, tools: Sequence[Tool]) -> ToolChoice | None:
    """The tool choice that is given as a mode. Raises InvalidRequest: it is given without tools."""
    if given is None or (not tools and given in ("none", "auto")):
        return None
    _require(tools)
    return ToolChoice(ToolChoiceMode(given))


def _require(tools: Sequence[Tool]) -> None:
    if not tools:
        raise not_allowed("tool_choice", "is given without tools", "with tools")


def _chosen(given: ToolChoiceBody, tools: Sequence[Tool]) -> ToolChoice:
    refuse_others(given, given.type)
    if given.type == "allowed_tools":
        at = "tool_choice.allowed_tools"
        only = required(given.allowed_tools, at)
        names = tuple(_known(one, f"{at}.tools.{index}", tools) for index, one in enumerate(only.tools))
        return ToolChoice(ToolChoiceMode(only.mode), allowed=names)
    return ToolChoice(ToolChoiceMode.NAMED, _known(given, "tool_choice", tools))


def refuse_others(choice: Body, *own: str) -> None:
    """Refuse fields of ``tool_choice`` that have no effect with its type, whose fields are ``own``."""
    for name in sorted(choice.model_fields_set.difference(own, ("type",))):
        if getattr(choice, name) is not None:
            raise not_allowed(f"tool_choice.{name}", "has no effect with this type", " and ".join(own))


def _known(given: ToolChoiceBody | ToolReference, at: str, tools: Sequence[Tool]) -> str:
    named = required(given.function if given.type == "function" else given.custom, f"{at}.{given.type}")
    return chosen_name(named.name, given.type, tools, f"{at}.{given.type}.name")


_FIRST: Final = ("type", "description", "enum", "items", "properties", "required")
_ORDER: Final[Mapping[str, int]] = {name: place for place, name in enumerate(_FIRST)}
_MAPS: Final = frozenset({"properties", "$defs", "definitions", "patternProperties"})


def canonical_json(schema: Mapping[str, Any]) -> str:
    """A schema as JSON text that does not depend on the order of its keywords."""
    return orjson.dumps(_ordered(schema)).decode()


def _ordered(value: Any, *, names: bool = False) -> Any:
    """Sort keywords. ``names``: the keys are names of properties, whose order has a meaning."""
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    keys = list(value) if names else sorted(value, key=lambda key: (_ORDER.get(key, len(_ORDER)), key))
    return {key: _ordered(value[key], names=not names and key in _MAPS) for key in keys}


def message_of(given: CallFields, role: Role, content: str | None, at: str) -> Message:
    """The message at ``at``. Raises InvalidRequest: fields that do not go together."""
    is_assistant = role is Role.ASSISTANT
    if given.tool_calls and not is_assistant:
        raise not_allowed(
            f"{at}.tool_calls", f"is given for role '{role.value}'", "in messages of 'assistant'"
        )
    if (given.tool_call_id is None) is (role is Role.TOOL):
        problem = "is missing" if role is Role.TOOL else f"is given for role '{role.value}'"
        raise not_allowed(f"{at}.tool_call_id", problem, "the id of a call, in messages of 'tool'")
    if content is None and not given.tool_calls and "content" not in given.__pydantic_fields_set__:
        raise InvalidRequest(f"{at}.content is missing; it is required", param=f"{at}.content")
    reasoning = given.reasoning if given.reasoning is not None else given.reasoning_content
    return Message(
        role,
        content or "",
        tool_calls=to_calls(given.tool_calls or (), f"{at}.tool_calls"),
        tool_call_id=given.tool_call_id,
        name=given.name,
        reasoning=reasoning if is_assistant else None,
    )


def holds_calls(messages: Sequence[Message]) -> bool:
    """Whether a conversation has a tool call or a tool's result."""
    return any(map(_calls, messages)) or any(map(_call_id, messages))
