"""Converts every way to ask for a shape of the answer to one :class:`ResponseFormat`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import Field

from engine.limits import MAX_SPEC_CHARS
from gateway.contracts.checks import plain_values
from gateway.contracts.fields import Body, Either, Neutral, Text, Texts
from gateway.contracts.refusals import TooManyValues, given, not_allowed, path_of
from gateway.contracts.values import PLAIN_TEXT, FormatType, ResponseFormat
from gateway.errors import GrammarTooComplex, InvalidRequest

# Bounds of a schema; OpenAI's own are 5,000 properties and 1,000 values.
MAX_PROPERTIES: Final = 5_000
MAX_ENUM_VALUES: Final = 5_000
MAX_PATTERN_CHARS: Final = 8_192
MAX_TEXT_CHARS: Final = 4 * MAX_SPEC_CHARS
"""Longest JSON text of a schema, with its white space; a longer one is not read."""
_MOST: Final[Mapping[str, int]] = {"properties": MAX_PROPERTIES, "enum": MAX_ENUM_VALUES}

# The fields of OpenAI's wrapper of a schema, with their types.
_WRAPPER_FIELDS: Final[Mapping[str, tuple[type, str]]] = {
    "schema": (dict, "a JSON schema"),
    "name": (str, "a string"),
    "description": (str, "a string"),
    "strict": (bool, "true or false"),
}

SchemaOrText = Either[dict[str, Any], Text]


class FormatBody(Body):
    """``response_format`` of both contracts."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredBody(Body):
    """vLLM's ``structured_outputs``: exactly one of the fields."""

    neutral: ClassVar[Neutral] = {
        "disable_fallback": (None, False),
        "disable_any_whitespace": (None, False),
        "disable_additional_properties": (None, False),
        "whitespace_pattern": (None,),
        "structural_tag": (None,),
    }
    json_schema: SchemaOrText | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: bool | None = None


def from_format(body: FormatBody | None) -> ResponseFormat:
    """The shape of ``response_format``. Raises InvalidRequest: the schema is missing or not valid."""
    if body is None:
        return PLAIN_TEXT
    field = "response_format.json_schema"
    if body.type != "json_schema":
        if body.json_schema is not None:
            raise not_allowed(field, "is an object", f"null when response_format.type is '{body.type}'")
        return ResponseFormat(FormatType(body.type))
    if body.json_schema is None:
        raise InvalidRequest(f"{field} is missing; it is required for type 'json_schema'", param=field)
    shape = object_shape(schema := _unwrapped(body.json_schema, field), field)
    return shape if schema is body.json_schema else replace(shape, strict=body.json_schema.get("strict"))


def schema_shape(schema: Mapping[str, Any] | str | None, field: str) -> ResponseFormat | None:
    """The shape of a bare JSON schema, given as an object or as its JSON text."""
    if schema is None:
        return None
    if isinstance(schema, str):
        if len(schema) > MAX_TEXT_CHARS:
            raise _too_large(field, f"has {len(schema)} characters", f"{MAX_SPEC_CHARS} or fewer")
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError:
            schema = None
        if not isinstance(schema, dict):
            raise not_allowed(field, "is not the JSON text of an object", "a JSON schema")
    return object_shape(schema, field)


def text_shape(kind: FormatType, text: str | None, field: str) -> ResponseFormat | None:
    if text is None:
        return None
    if not text:
        raise not_allowed(field, "is empty", f"a {kind.value}")
    return _bounded(kind, text, field)


def choice_shape(choices: list[str] | None, field: str) -> ResponseFormat | None:
    """The shape of a closed choice; ``spec`` is the JSON array of the choices."""
    if choices is None:
        return None
    if not choices:
        raise not_allowed(field, "is an array of 0 items", "1 item or more")
    return _bounded(FormatType.CHOICE, orjson.dumps(choices).decode(), field)


def object_shape(schema: Mapping[str, Any], field: str) -> ResponseFormat:
    """The shape of a JSON schema. Raises as :func:`bounded_schema`."""
    return _bounded(FormatType.JSON_SCHEMA, orjson.dumps(bounded_schema(schema, field)).decode(), field)


def bounded_schema(schema: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the schema if it is plain JSON, within the bounds of depth, number and length.

    Raises InvalidRequest; GrammarTooComplex if a number or a length is over its bound.
    """
    if "x-guidance" in schema:
        param = path_of((field, "x-guidance"))
        raise InvalidRequest(f"{param} is not supported; it changes options of the compiler", param=param)
    counts = dict.fromkeys(_MOST, 0)
    try:
        for around, name, value in plain_values(schema, field):
            if isinstance(value, dict | list) and isinstance(name, str) and name in _MOST:
                counts[name] += len(value)
                if counts[name] > _MOST[name]:
                    raise _too_large(field, f"has more than {_MOST[name]} {name}", f"{_MOST[name]}")
            elif name == "pattern" and isinstance(value, str) and len(value) > MAX_PATTERN_CHARS:
                shown = path_of((*around, name))
                raise _too_large(shown, f"has {len(value)} characters", f"{MAX_PATTERN_CHARS}")
    except TooManyValues as error:
        raise GrammarTooComplex(error.message, param=field) from None
    if (size := len(orjson.dumps(schema))) > MAX_SPEC_CHARS:
        raise _too_large(field, f"has {size} characters", f"{MAX_SPEC_CHARS} or fewer")
    return schema


def _bounded(kind: FormatType, spec: str, field: str) -> ResponseFormat:
    if len(spec) > MAX_SPEC_CHARS:
        raise _too_large(field, f"has {len(spec)} characters", f"{MAX_SPEC_CHARS} or fewer")
    return ResponseFormat(kind, spec, field)


def _too_large(param: str, given: str, allowed: str) -> GrammarTooComplex:
    return GrammarTooComplex(f"{param} {given}; allowed: {allowed}", param=param)


def _unwrapped(value: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The schema itself, given bare or in OpenAI's ``{name, schema}`` object."""
    if "schema" not in value:
        return value
    for name, one in value.items():
        if name not in _WRAPPER_FIELDS:
            path = path_of((field, name))
            raise InvalidRequest(f"{path} is not a known field", param=path)
        kind, allowed = _WRAPPER_FIELDS[name]
        if not isinstance(one, kind) and (one is not None or name == "schema"):
            raise not_allowed(f"{field}.{name}", f"is {given(one)}", allowed)
    schema: Mapping[str, Any] = value["schema"]
    return schema
