"""From the many ways to ask for a shape to one :class:`ResponseFormat`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import Field, Tag

from gateway.contracts.checks import check_plain
from gateway.contracts.fields import Body, Text, Texts
from gateway.contracts.refusals import not_allowed, path_of
from gateway.contracts.values import FormatType, ResponseFormat
from gateway.errors import InvalidRequest

_WRAPPER_FIELDS: Final = frozenset({"name", "schema", "strict", "description"})

SchemaOrText = Annotated[
    Annotated[dict[str, Any], Tag("~object")] | Annotated[Text, Tag("~text")],
    Field(union_mode="left_to_right"),
]


class FormatBody(Body):
    """``response_format`` of both contracts."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredBody(Body):
    """vLLM's ``structured_outputs``: exactly one of the fields."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
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
    """The shape of ``response_format``. Raises InvalidRequest: the schema."""
    if body is None:
        return ResponseFormat()
    field = "response_format.json_schema"
    if body.type != "json_schema":
        if body.json_schema is not None:
            raise not_allowed(field, "is an object", f"null when response_format.type is '{body.type}'")
        return ResponseFormat(FormatType(body.type))
    if body.json_schema is None:
        raise InvalidRequest(f"{field} is missing; it is required for type 'json_schema'", param=field)
    return _schema(_unwrapped(body.json_schema, field), field)


def schema_shape(schema: Mapping[str, Any] | str | None, field: str) -> ResponseFormat | None:
    """The shape of a bare JSON schema, given as an object or as its JSON text."""
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError:
            schema = None
        if not isinstance(schema, dict):
            raise not_allowed(field, "is not the JSON text of an object", "a JSON schema")
    return _schema(schema, field)


def text_shape(kind: FormatType, text: str | None, field: str) -> ResponseFormat | None:
    """The shape of a pattern or a grammar."""
    if text is None:
        return None
    if not text:
        raise not_allowed(field, "is empty", f"a {kind.value}")
    return ResponseFormat(kind, text)


def choice_shape(choices: list[str] | None, field: str) -> ResponseFormat | None:
    """The shape of a closed choice; ``spec`` is the JSON array of the choices."""
    if choices is None:
        return None
    if not choices:
        raise not_allowed(field, "is an array of 0 items", "1 item or more")
    return ResponseFormat(FormatType.CHOICE, orjson.dumps(choices).decode())


def _schema(schema: Mapping[str, Any], field: str) -> ResponseFormat:
    check_plain(schema, field)
    return ResponseFormat(FormatType.JSON_SCHEMA, orjson.dumps(schema).decode())


def _unwrapped(value: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The schema itself, out of OpenAI's ``{name, schema}`` object or bare."""
    if "schema" not in value:
        return value
    schema = value["schema"]
    if not isinstance(schema, dict):
        raise not_allowed(f"{field}.schema", "is not an object", "a JSON schema")
    for name in value:
        if name not in _WRAPPER_FIELDS:
            path = path_of((field, name))
            raise InvalidRequest(f"{path} is not a known field", param=path)
    return schema
