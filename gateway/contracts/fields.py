"""The strict base of every request model, the field types they share, and bodies made of attributes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, cast

from msgspec import Meta
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
U = TypeVar("U")
MAX_NAME: Final = 128  # longest id or name, in characters (the public surface's bound of ``request_id``)
MAX_CALL_ID: Final = 16_384
"""Longest id of a tool call, in characters: LiteLLM writes the signature of Gemini's thought into it, often a
thousand characters, and the model's next turn needs it back."""
MAX_LABEL: Final = 256  # longest caller-made label such as ``session_id`` or ``user``, in characters
MAX_STOPS: Final = 16
"""Most stop strings; OpenAI takes 4, and each one costs the detokenizer a search per token."""
MAX_STOP_CHARS: Final = 256  # longest stop string; bounds how much text a stream must hold back
MAX_CHUNKS: Final = 1_024  # most evidence chunks; hundreds of times what fits into any prompt budget
MAX_DEADLINE_MS: Final = 86_400_000  # longest deadline: one day
MAX_TOKENS: Final = 1_000_000_000
"""Upper bound of ``max_tokens`` as a number; what really fits is decided by the budget stage."""
MAX_TOKEN_ID: Final = 2**31 - 1  # largest token id that is taken as a number; the vocabulary decides the rest
SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**63 - 1

Neutral = Mapping[str, tuple[object, ...]]
"""Fields of another API that Sluice does not implement, with the values that have no effect."""
ANYTHING: Final = object()
"""A neutral value that stands for all values: the field can have no effect on the answer."""


@dataclass(frozen=True, slots=True)
class Instead:
    """An entry among neutral values that matches no value: refusals name it as the field's replacement."""

    field: str


def no_null(text: str, *at: int | str) -> str:
    """Return the text, or refuse it for a null character; ``at`` is its path from the validated value."""
    if "\x00" in text:
        raise PydanticCustomError("null_character", "contains a null character", {"at": at})
    return text


def _printable(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise PydanticCustomError("unprintable", "is blank or has control characters")
    return text


# ``Meta`` repeats the bounds for msgspec, which reads ordinary bodies (:mod:`gateway.contracts.plain_chat`).
Text = Annotated[str, AfterValidator(no_null)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID), AfterValidator(_printable)]
# The tool's name in a call of the history: a model also writes names of tools that do not exist.
CalledName = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID), AfterValidator(no_null)]
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL), AfterValidator(_printable)]
# A client's own label, such as ``user``: some clients send an empty text for none.
OptionalLabel = Annotated[Label | None, BeforeValidator(lambda given: None if given == "" else given)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), AfterValidator(no_null)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
DeadlineMs = Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), Meta(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0), Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0), Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
Seed = Annotated[int, Field(ge=SEED_MIN, le=SEED_MAX), Meta(ge=SEED_MIN, le=SEED_MAX)]
Priority = Annotated[int, Field(ge=-1, le=1)]
# A client's own labels of a stored object, with OpenAI's bounds.
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512), AfterValidator(no_null)],
    ],
    Field(max_length=16),
]

# Validation of a list stops at its first bad item: a million bad items must not make a million errors.
Listed = Annotated[list[T], Field(fail_fast=True)]
Either = Annotated[
    Annotated[T, Tag("~first")] | Annotated[U, Tag("~second")], Field(union_mode="left_to_right")
]
TextOr = Either[Text, Listed[T]]
StopList = Annotated[Listed[StopText], Field(max_length=MAX_STOPS)]
Stop = Either[StopText, StopList]
TokenIds = Listed[TokenId]
Texts = Listed[Text]
Prompts = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[TokenIds, Tag("~ids")]
    | Annotated[Texts, Tag("~texts")]
    | Annotated[Listed[TokenIds], Tag("~batch")],
    Field(union_mode="left_to_right"),
]


def from_attributes(body: type[T], source: object, **own: Any) -> T:
    """The TypedDict ``body`` with the fields ``own``; its others are the source's attributes of that name."""
    fields: Any = body
    names = [name for name in fields.__annotations__ if name in own or name in fields.__required_keys__]
    return cast("T", {name: own[name] if name in own else getattr(source, name) for name in names})


def label_or_none(given: object) -> str | None:
    """The caller's label if it is usable, which is one printable line within the bound; else ``None``."""
    usable = isinstance(given, str) and given.isprintable() and given.strip() and len(given) <= MAX_LABEL
    return str(given) if usable else None


def stops(given: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a ``Stop``, which is one string or a list."""
    return (given,) if isinstance(given, str) else tuple(given or ())


class StrictObject(BaseModel):
    """A strict JSON object: no coercion, no NaN or infinity. Unknown fields are collected, not refused: the
    parser would build an error for each of them, be it a million.

    A refusal of any other value than those of ``neutral`` names the field.
    """

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        frozen=True,
        hide_input_in_errors=True,
        json_schema_extra={"additionalProperties": False},
    )
    neutral: ClassVar[Neutral] = MappingProxyType({})


class Body(StrictObject):
    """A strict JSON object that refuses unknown fields."""

    @model_validator(mode="after")
    def _only_known(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            check_extra(name, value, self.neutral)
        return self


def is_neutral(value: object, allowed: Iterable[object]) -> bool:
    """Whether a value is one of the ``allowed`` values, which have no effect."""
    # JSON's true is not 1, though Python's True is.
    return any(
        one is ANYTHING or (value == one and isinstance(value, bool) == isinstance(one, bool))
        for one in allowed
    )


def check_extra(name: str, value: Any, neutral: Neutral, at: tuple[int | str, ...] = ()) -> None:
    """Refuse a field that is not known, or that asks for something that is not implemented."""
    allowed = neutral.get(name)
    where = {"at": (*at, name)}
    if allowed is None:
        raise PydanticCustomError("unknown_field", "is not a known field", where)
    if not is_neutral(value, allowed):
        shown = " or ".join(_shown(one) for one in allowed)
        raise PydanticCustomError("unsupported_field", "is not supported", {**where, "allowed": shown})


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value.field} instead" if isinstance(value, Instead) else repr(value)
