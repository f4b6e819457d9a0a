"""The body of ``POST /v1/messages``.

By contract, unknown fields are no error. Known fields that Sluice does not implement are refused by name.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from gateway.contracts.fields import (
    ANYTHING,
    CalledName,
    CallId,
    Either,
    Label,
    Listed,
    MaxTokens,
    Name,
    Neutral,
    StopList,
    StrictObject,
    Temperature,
    Text,
    TextOr,
    TopK,
    TopP,
    check_extra,
)
from gateway.contracts.images import ImageUrlText
from gateway.contracts.native import SluiceFields
from gateway.contracts.tool_fields import MAX_TOOLS


class ImageSource(StrictObject):
    """An image's source: base64 in the body, or a URL."""

    type: Name
    media_type: Name | None = None
    data: Text | None = None
    url: ImageUrlText | None = None


class ContentBlock(StrictObject):
    """A block of a message; its fields depend on its type."""

    type: Name
    text: Text | None = None
    id: CallId | None = None
    name: CalledName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: "TextOr[ContentBlock] | None" = None
    is_error: bool | None = None
    thinking: Text | None = None
    source: Either[ImageSource, Text] | None = None  # a text in search results, which are refused


BlockContent = TextOr[ContentBlock]


class BlockMessage(StrictObject):
    """One turn; ``system`` between the turns is a later instruction."""

    role: Literal["user", "assistant", "system"]
    content: BlockContent


class InputTool(StrictObject):
    """A tool that the caller runs."""

    type: Name | None = None
    name: Name | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class InputToolChoice(StrictObject):
    """Whether the model may or must call tools, which one, and whether several at once."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(StrictObject):
    """The model's thinking: enabled with a token budget, or disabled; other types have no effect."""

    type: Name
    budget_tokens: Annotated[int, Field(ge=1_024)] | None = None


class OutputFormatBody(StrictObject):
    """The shape of the answer's text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictObject):
    """The model's effort, and the shape of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatBody | None = None


class RequestMetadata(StrictObject):
    """The caller's own id of the end user."""

    user_id: str | None = None


class CountRequest(StrictObject):
    """The body of ``POST /v1/messages/count_tokens``: the fields that affect the prompt."""

    # Labels without an effect on the answer, and fields that are refused unless their value has no effect.
    neutral: ClassVar[Neutral] = {
        "cache_control": (ANYTHING,),
        "container": (None,),
        "inference_geo": (ANYTHING,),
        "mcp_servers": (None, []),
        "service_tier": (ANYTHING,),
        "thread": (None,),
    }
    model: Label
    messages: Listed[BlockMessage]
    system: BlockContent | None = None
    tools: Annotated[Listed[InputTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormatBody | None = None  # the earlier name of ``output_config.format``
    sluice: SluiceFields | None = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name in self.neutral:
                check_extra(name, value, self.neutral)
        return self

    @property
    def unknown(self) -> list[str]:
        return [name for name in self.__pydantic_extra__ or () if name not in self.neutral]


class MessagesRequest(CountRequest):
    """The body of ``POST /v1/messages``."""

    # A summary of the conversation in place of an answer, which counting ignores.
    neutral: ClassVar[Neutral] = {**CountRequest.neutral, "compaction": (None,)}
    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: StopList | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: RequestMetadata | None = None


MAX_DROPPED: Final = 32  # most names of unknown fields that an answer's warnings repeat
