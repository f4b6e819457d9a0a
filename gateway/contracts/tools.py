"""Converts the tools, tool choices and tool calls of request bodies to internal values, within bounds.

A schema is written as canonical JSON: without blanks, with keywords in a fixed order. Names of properties
keep the caller's order, since a model writes arguments in that order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NoReturn

import orjson

from budgeting.template import CONTINUES, GENERATES, RESERVED
from budgeting.values import Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.checks import check_plain
from gateway.contracts.features import Feature
from gateway.contracts.fields import Body
from gateway.contracts.formats import bounded_schema
from gateway.contracts.refusals import not_allowed, path_of
from gateway.contracts.tool_fields import (
    CallFields,
    CustomToolBody,
    FunctionBody,
    HistoryCall,
    ToolBody,
    ToolChoiceBody,
    ToolFields,
    ToolReference,
)
from gateway.errors import InvalidRequest

_calls: Final = attrgetter("tool_calls")
_call_id: Final = attrgetter("tool_call_id")
MAX_TOOLS_CHARS: Final = 524_288
"""Most characters of all tools' descriptions and schemas together: eight of the largest schemas."""
MAX_KWARGS: Final = 32
"""Most variables of ``chat_template_kwargs``."""
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
        _choice(body.tool_choice, tools),
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
    kwargs: Mapping[str, Any] = MappingProxyType({}),
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
    return named_tools((f"tools.{index}.{one.type}", _own(one, index)) for index, one in enumerate(bodies))


def _own(one: ToolBody, index: int) -> FunctionBody | CustomToolBody:
    own = one.function if one.type == "function" else one.custom
    if own is None:
        _missing(f"tools.{index}.{one.type}")
    return own


def named_tools(bodies: Iterable[tuple[str, FunctionBody | CustomToolBody]]) -> tuple[Tool, ...]:
    """The checked tools of these bodies, each given with its path in the request's body."""
    tools: list[Tool] = []
    paths: list[str] = []
    for at, own in bodies:
        paths.append(at)
        if isinstance(own, FunctionBody):
            schema = own.parameters
            text = None if schema is None else canonical_json(bounded_schema(schema, f"{at}.parameters"))
            tool = Tool(own.name, ToolKind.FUNCTION, own.description, text, own.strict)
        else:
            text = None
            if own.format is not None:
                check_plain(own.format, f"{at}.format")
                text = canonical_json(own.format)
            tool = Tool(own.name, ToolKind.CUSTOM, own.description, format=text)
        tools.append(tool)
    return checked_tools(tools, lambda index: f"{paths[index]}.name")


def checked_tools(tools: Sequence[Tool], name_at: Callable[[int], str]) -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequest: a repeated name (at ``name_at(index)``), or too much text."""
    names: set[str] = set()
    chars = 0
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise not_allowed(name_at(index), "is also the name of another tool", "each name once")
        names.add(tool.name)
        chars += len(tool.parameters or "") + len(tool.format or "") + len(tool.description or "")
        if chars > MAX_TOOLS_CHARS:
            raise not_allowed("tools", f"has more than {MAX_TOOLS_CHARS} characters", f"{MAX_TOOLS_CHARS}")
    return tuple(tools)


def to_calls(bodies: Sequence[HistoryCall], at: str) -> tuple[ToolCall, ...]:
    """The calls of a message; ``at`` is the path of its ``tool_calls``. Raises InvalidRequest."""
    calls = []
    for index, one in enumerate(bodies):
        if one.type == "function":
            if one.function is None:
                _missing(f"{at}.{index}.function")
            calls.append(ToolCall(one.id, one.function.name, one.function.arguments or ""))
        else:
            if one.custom is None:
                _missing(f"{at}.{index}.custom")
            calls.append(ToolCall(one.id, one.custom.name, one.custom.input, ToolKind.CUSTOM))
    return tuple(calls)


def template_kwargs(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The caller's variables for the chat template. Raises InvalidRequest: a reserved name, or too much."""
    if not given:
        return _NO_KWARGS
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


_NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})


def chat_ending(*, continues: bool | None, generates: bool | None) -> Mapping[str, Any]:
    """vLLM's fields for how the prompt ends; empty for the default, the prompt for an answer.

    Raises InvalidRequest: both are true.
    """
    if continues and generates:
        raise not_allowed(GENERATES, f"is true with {CONTINUES}", f"false, or {CONTINUES} false")
    if continues:
        return {CONTINUES: True, GENERATES: False}
    return _NO_KWARGS if generates is not False else {GENERATES: False}


def _choice(given: str | ToolChoiceBody | None, tools: Sequence[Tool]) -> ToolChoice | None:
    if given is None or (not tools and given in ("none", "auto")):
        return None
    if not tools:
        raise not_allowed("tool_choice", "is given without tools", "with tools")
    if isinstance(given, str):
        return ToolChoice(ToolChoiceMode(given))
    refuse_others(given, given.type)
    if given.type == "allowed_tools":
        if given.allowed_tools is None:
            _missing("tool_choice.allowed_tools")
        at = "tool_choice.allowed_tools.tools"
        names = tuple(
            _known(one, f"{at}.{index}", tools) for index, one in enumerate(given.allowed_tools.tools)
        )
        return ToolChoice(ToolChoiceMode(given.allowed_tools.mode), allowed=names)
    return ToolChoice(ToolChoiceMode.NAMED, _known(given, "tool_choice", tools))


def refuse_others(choice: Body, *own: str) -> None:
    """Refuse fields of ``tool_choice`` that have no effect with its type, whose fields are ``own``."""
    for name in sorted(choice.model_fields_set.difference(own, ("type",))):
        if getattr(choice, name) is not None:
            raise not_allowed(f"tool_choice.{name}", "has no effect with this type", " and ".join(own))


def _known(given: ToolChoiceBody | ToolReference, at: str, tools: Sequence[Tool]) -> str:
    """The name of the referenced tool. Raises InvalidRequest: it is not a tool of the request."""
    named = given.function if given.type == "function" else given.custom
    if named is None:
        _missing(f"{at}.{given.type}")
    if not any(tool.name == named.name and tool.kind == given.type for tool in tools):
        raise not_allowed(f"{at}.{given.type}.name", "is not the name of a tool", "a name in tools")
    return named.name


def _missing(param: str) -> NoReturn:
    raise not_allowed(param, "is missing", "an object")


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
