"""The fields that all of OpenAI's request bodies share."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from gateway.contracts import openai_fields
from gateway.contracts.checks import check_plain
from gateway.contracts.features import Feature
from gateway.contracts.fields import (
    MAX_TOKENS,
    Body,
    Label,
    OptionalLabel,
    Priority,
    StrictObject,
    Text,
    Texts,
    TokenIds,
    check_extra,
    is_neutral,
)
from gateway.contracts.formats import FormatBody, SchemaOrText, StructuredBody
from gateway.contracts.native import NativeSampling, SluiceFields
from gateway.contracts.refusals import not_allowed, path_of
from gateway.contracts.values import EMPTY
from gateway.errors import InvalidRequest

MAX_EXTRA: Final = 32  # most fields of one body that Sluice does not know


MAX_STOP_IDS: Final = 128  # most stop token ids; every generated token is compared with each


class MessagePart(StrictObject):
    """A message or a part of one; unknown fields are no error here, as in the body itself.

    The list's validator checks the fields of all messages in one pass (:func:`check_known`).
    """

    def unknown(self, path: str) -> tuple[str, ...]:
        return tuple(f"{path}.{name}" for name in _unknown(self))


def _unknown(body: StrictObject) -> dict[str, Any]:
    """The fields that Sluice does not know, except those that are null, which ask for nothing."""
    given = (body.__pydantic_extra__ or {}).items()
    return {name: value for name, value in given if value is not None and name not in body.neutral}


def check_known(body: StrictObject, passable: Collection[str] = (), at: tuple[int | str, ...] = ()) -> None:
    """Refuse fields that Sluice knows but does not implement, except ``passable``, and unprintable names.

    ``at`` is the path to ``body`` from the validated value.
    """
    for name, value in (body.__pydantic_extra__ or {}).items():
        known = name in body.neutral and name not in passable
        if known or path_of([name]) != name:
            check_extra(name, value, body.neutral, at)


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    neutral = openai_fields.STREAM_OPTIONS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StreamFields(SluiceFields):
    """The object ``sluice`` of a body; ``token_ids``: a stream's chunks contain the ids of their tokens."""

    token_ids: bool | None = None


class OpenAIBody(NativeSampling):
    """Fields of both bodies; the ranges are OpenAI's if it has the field, else vLLM's."""

    model: Label
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    response_format: FormatBody | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredBody | None = None
    priority: Priority | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: OptionalLabel = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sluice: StreamFields | None = None

    @model_validator(mode="after")
    def _only_known(self) -> Self:
        """Check known fields. Unknown ones are no error: the backend's configuration decides."""
        check_known(self, openai_fields.PASSABLE)
        return self

    def extra(self, in_messages: Sequence[str] = ()) -> tuple[Mapping[str, Any], frozenset[Feature]]:
        """The fields that are only passed to the backend, and the features that it needs for them.

        ``in_messages``: the paths of unknown fields of messages. Raises InvalidRequest: too many unknown
        fields, or a value that is not plain JSON.
        """
        given = self.__pydantic_extra__
        if not given and not in_messages:
            return EMPTY, frozenset()
        given = given or {}
        passed = {
            name: value
            for name, value in given.items()
            if name in openai_fields.PASSABLE and not is_neutral(value, self.neutral[name])
        }
        arguments = passed.get("vllm_xargs")
        if isinstance(arguments, dict) and (hosts := openai_fields.TRANSFERS & arguments.keys()):
            raise not_allowed("vllm_xargs", f"has {min(hosts)}", "other names")
        unknown = _unknown(self)
        names = (*unknown, *in_messages)
        if len(names) > MAX_EXTRA:
            raise InvalidRequest(
                f"{names[0]} and {len(names) - 1} others are not known fields", param=names[0]
            )
        needs = {Feature.FIELDS_PASSED} if passed else set()
        if names:
            needs.add(Feature.UNKNOWN_FIELDS)
        extra = passed | unknown
        for name, value in extra.items():
            check_plain(value, name)
        return extra, frozenset(needs)
