"""The body of ``POST /v1/responses``."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from gateway.contracts.fields import (
    ANYTHING,
    Body,
    CalledName,
    CallId,
    Either,
    Label,
    Listed,
    MaxTokens,
    Metadata,
    Name,
    Neutral,
    OptionalLabel,
    Temperature,
    Text,
    TextOr,
    TopP,
)
from gateway.contracts.images import ImageDetail, ImageUrlText
from gateway.contracts.native import SluiceFields
from gateway.contracts.openai_fields import CACHE_MARK, SERVICE
from gateway.contracts.tool_fields import MAX_TOOLS, ReasoningEffort

Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""What ``include`` may ask for; OpenAI's hosted tools, of which some values are, do not run here."""

_LABELS: Final[Neutral] = MappingProxyType(
    dict.fromkeys(
        (
            "id",
            "status",
            "phase",
            "annotations",
            "logprobs",
            "internal_chat_message_metadata_passthrough",
            # What the official client has parsed a text and a call's arguments to.
            "parsed",
            "parsed_arguments",
        ),
        (ANYTHING,),
    )
)


class ItemPart(Body):
    """A part of a message, a tool's output or a reasoning item: a text, or an image of a user or a tool."""

    neutral: ClassVar[Neutral] = {**_LABELS, **CACHE_MARK, "file_id": (None,)}
    type: Literal[
        "input_text", "output_text", "refusal", "reasoning_text", "summary_text", "text", "input_image"
    ]
    text: Text | None = None
    image_url: ImageUrlText | None = None
    detail: ImageDetail | None = None
    refusal: Text | None = None


class InputItem(Body):
    """One item of ``input``; its fields depend on its type."""

    # The official client's calls have the fields of programmatic calls, with its own name of ``async``.
    neutral = MappingProxyType(
        {
            **_LABELS,
            "async": (None, False),
            "async_": (None, False),
            "caller": (None, {"type": "direct"}),
            "created_by": (ANYTHING,),
        }
    )
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "compaction",
        "item_reference",
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: TextOr[ItemPart] | None = None
    call_id: CallId | None = None
    name: CalledName | None = None
    namespace: Name | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: TextOr[ItemPart] | None = None
    summary: Listed[ItemPart] | None = None
    encrypted_content: Text | None = None

    @property
    def is_incomplete(self) -> bool:
        return (self.__pydantic_extra__ or {}).get("status") == "incomplete"

    @property
    def referenced(self) -> str | None:
        """The id of the stored item that this one references (empty: no text); ``None`` for other types."""
        if self.type != "item_reference":
            return None
        found = (self.__pydantic_extra__ or {}).get("id")
        return found if isinstance(found, str) else ""


class PlainTool(Body):
    """A function or a custom tool; unlike in chats, its fields are not nested."""

    neutral: ClassVar[Neutral] = {
        "async": (None, False),
        "defer_loading": (None, False),
        "output_schema": (None,),
        "allowed_callers": (None, ["direct"]),
    }
    type: Literal["function", "custom"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


class ToolItem(PlainTool):
    """One of ``tools``; ``tools`` of a ``namespace`` are its members."""

    type: Literal["function", "custom", "namespace"]  # type: ignore[assignment]
    tools: Annotated[Listed[PlainTool], Field(max_length=MAX_TOOLS)] | None = None


class NamedTool(Body):
    """A reference to a tool by its name."""

    type: Literal["function", "custom"]
    name: Name
    namespace: Name | None = None


class ChoiceObject(Body):
    """``tool_choice`` where it is an object."""

    type: Literal["function", "custom", "allowed_tools"]
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[Listed[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None


class TextFormat(Body):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextBody(Body):
    """``text``."""

    neutral: ClassVar[Neutral] = {"verbosity": (None, "medium")}
    format: TextFormat | None = None


class ReasoningBody(Body):
    """``reasoning``; no summary is ever made: the answer contains the reasoning itself."""

    neutral: ClassVar[Neutral] = {
        "context": (None, "auto"),
        "mode": (None, "standard"),
        "summary": (None, "auto", "concise", "detailed"),
        "generate_summary": (None, "auto", "concise", "detailed"),
    }
    effort: ReasoningEffort | None = None


class ResponsesStreamOptions(Body):
    """``stream_options``."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (None, True, False)}


class ResponsesBody(Body):
    """The body of ``POST /v1/responses``."""

    neutral: ClassVar[Neutral] = {
        **SERVICE,
        "access_programs": (None, {}),
        "background_options": (None, {}, {"completion_window": "soonest"}),
        "client_metadata": (ANYTHING,),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None, {}),
        "max_tool_calls": (None,),
        "personality": (None,),
        "prompt": (None,),
        "stop": (None, []),
    }
    model: Label
    input: TextOr[InputItem]
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool | None = None
    tools: Annotated[Listed[ToolItem], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Either[Literal["none", "auto", "required"], ChoiceObject] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    include: list[Includable] | None = None
    metadata: Metadata | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    prompt_cache_key: OptionalLabel = None
    user: OptionalLabel = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    sluice: SluiceFields | None = None


class CompactBody(ResponsesBody):
    """The body of ``POST /v1/responses/compact``: as for a response, which may be one without new input."""

    input: TextOr[InputItem] | None = None  # type: ignore[assignment]
