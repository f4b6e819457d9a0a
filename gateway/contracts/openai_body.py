"""The fields that all of OpenAI's request bodies share."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.contracts import openai_fields
from gateway.contracts.checks import check_plain
from gateway.contracts.features import Feature
from gateway.contracts.fields import (
    Body,
    Label,
    Name,
    Priority,
    Text,
    Texts,
    check_extra,
    is_neutral,
)
from gateway.contracts.formats import FormatBody, SchemaOrText, StructuredBody
from gateway.contracts.native import NativeSampling, SluiceFields
from gateway.contracts.refusals import path_of
from gateway.errors import InvalidRequest

MAX_EXTRA: Final = 32
"""Most fields of one body that Sluice does not know."""


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
    user: Annotated[Label | None, BeforeValidator(lambda user: user or None)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sluice: StreamFields | None = None

    @model_validator(mode="after")
    def _only_known(self) -> Self:
        """Unknown fields are no error here: the backend decides."""
        for name, value in (self.__pydantic_extra__ or {}).items():
            known = name in self.neutral and name not in openai_fields.PASSABLE
            if known or path_of([name]) != name:
                check_extra(name, value, self.neutral)
        return self

    def extra(self) -> tuple[Mapping[str, Any], frozenset[Feature]]:
        """The fields that are the backend's affair, and what it must have for them. Raises InvalidRequest."""
        given = self.__pydantic_extra__ or {}
        passed = {
            name: value
            for name, value in given.items()
            if name in openai_fields.PASSABLE and not is_neutral(value, self.neutral[name])
        }
        unknown = {name: value for name, value in given.items() if name not in self.neutral}
        if len(unknown) > MAX_EXTRA:
            name = next(iter(unknown))
            raise InvalidRequest(f"{name} and {len(unknown) - 1} others are not known fields", param=name)
        needs = {Feature.FIELDS_PASSED} if passed else set()
        if unknown:
            needs.add(Feature.UNKNOWN_FIELDS)
        extra = passed | unknown
        for name, value in extra.items():
            check_plain(value, name)
        return extra, frozenset(needs)
