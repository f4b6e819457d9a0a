"""Fields of tools, tool choices and tool calls that native and OpenAI bodies share."""

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from gateway.contracts.fields import (
    ANYTHING,
    Body,
    CalledName,
    CallId,
    Either,
    Listed,
    Name,
    Neutral,
    StrictObject,
    Text,
)
from gateway.contracts.openai_fields import CACHE_MARK

MAX_TOOLS: Final = 512  # most tools of a request: agents with several MCP servers send over 128
MAX_CALLS: Final = 128  # most calls of one message
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionBody(Body):
    """A function that the model may call."""

    neutral: ClassVar[Neutral] = CACHE_MARK
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomToolBody(Body):
    """A tool whose input is free text; ``format`` may restrict its form."""

    name: Name
    description: Text | None = None
    format: dict[str, Any] | None = None


class ToolBody(Body):
    """One item of ``tools``."""

    neutral: ClassVar[Neutral] = {**CACHE_MARK, "defer_loading": (None, False)}
    type: Literal["function", "custom"]
    function: FunctionBody | None = None
    custom: CustomToolBody | None = None


class ToolNameBody(Body):
    """The name of a tool."""

    name: Name


class ToolReference(Body):
    """One of the allowed tools."""

    type: Literal["function", "custom"]
    function: ToolNameBody | None = None
    custom: ToolNameBody | None = None


class AllowedToolsBody(Body):
    """The tools that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[Listed[ToolReference], Field(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceBody(ToolReference):
    """``tool_choice`` where it is an object."""

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]
    allowed_tools: AllowedToolsBody | None = None


class HistoryFunction(Body):
    """A function's name, and its arguments as JSON text; the official client adds ``parsed_arguments``."""

    neutral: ClassVar[Neutral] = {"parsed_arguments": (ANYTHING,)}
    name: CalledName
    arguments: Text | None = None


class HistoryCustom(Body):
    """A custom tool's name and input."""

    name: CalledName
    input: Text


class HistoryCall(Body):
    """One of an assistant message's ``tool_calls``; ``index``, copied from a stream, has no effect."""

    neutral: ClassVar[Neutral] = {"index": (ANYTHING,)}
    id: CallId
    type: Literal["function", "custom"] = "function"
    function: HistoryFunction | None = None
    custom: HistoryCustom | None = None


Tools = Annotated[Listed[ToolBody], Field(max_length=MAX_TOOLS)]
Calls = Annotated[Listed[HistoryCall], Field(max_length=MAX_CALLS)]


class ToolFields(Body):
    """The request's fields for tools, for reasoning and for the chat template."""

    tools: Tools | None = None
    tool_choice: Either[Literal["none", "auto", "required"], ToolChoiceBody] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CallFields(StrictObject):
    """What a message may have besides its role and content.

    ``name`` distinguishes speakers if the chat template shows it; that of a result is the called tool's.
    ``reasoning`` takes precedence over its older name ``reasoning_content``.
    """

    tool_calls: Calls | None = None
    tool_call_id: CallId | None = None
    name: CalledName | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
