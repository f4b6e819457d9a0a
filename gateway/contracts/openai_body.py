"""The fields that all of OpenAI's request bodies share."""

from typing import Annotated, Any

from pydantic import Field

from gateway.contracts import openai_fields
from gateway.contracts.fields import (
    Body,
    Label,
    Name,
    Priority,
    Text,
    Texts,
)
from gateway.contracts.formats import FormatBody, SchemaOrText, StructuredBody
from gateway.contracts.native import NativeSampling, SluiceFields


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    neutral = openai_fields.STREAM_OPTIONS
    include_usage: bool | None = None


class StreamFields(SluiceFields):
    """The object ``sluice`` of a body; with ``token_ids`` a stream's chunks have the ids of their tokens."""

    token_ids: bool | None = None


class OpenAIBody(NativeSampling):
    """What both of OpenAI's bodies have; the ranges are OpenAI's where it has the field, else vLLM's."""

    model: Name
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: FormatBody | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredBody | None = None
    priority: Priority | None = None
    user: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sluice: StreamFields | None = None
