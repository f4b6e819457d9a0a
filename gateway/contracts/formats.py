"""From the many ways to ask for a shape to one :class:`ResponseFormat`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import Field, Tag

from gateway.contracts.fields import Body, Text, Texts
from gateway.contracts.plain import check_plain, json_text
from gateway.contracts.refusals import path_of
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


class Shapes:
    """Collects the shapes that one request asks for; only one may be."""

    def __init__(self) -> None:
        self._asked: list[tuple[str, ResponseFormat]] = []

    def add(self, field: str, shape: ResponseFormat | None) -> None:
        """Note that ``field`` asks for ``shape`` (``None``: it does not ask)."""
        if shape is not None and shape.type is not FormatType.TEXT:
            self._asked.append((field, shape))

    def only(self) -> tuple[str, ResponseFormat]:
        """The one shape asked for and the field that asks; plain text when none does.

        Raises:
            InvalidRequest: two fields ask for a shape.
        """
        if not self._asked:
            return "response_format", ResponseFormat()
        if len(self._asked) > 1:
            (first, _), (second, _) = self._asked[:2]
            raise InvalidRequest(
                f"{second} is given together with {first}; allowed: one of the fields that shape the answer",
                param=second,
            )
        return self._asked[0]


def from_format(body: FormatBody | None) -> ResponseFormat:
    """The shape that ``response_format`` asks for.

    Raises:
        InvalidRequest: a schema is missing, superfluous or not plain JSON.
    """
    if body is None:
        return ResponseFormat()
    field = "response_format.json_schema"
    if body.type != "json_schema":
        if body.json_schema is not None:
            raise InvalidRequest(
                f"{field} is an object; allowed: null when response_format.type is '{body.type}'", param=field
            )
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
            raise InvalidRequest(
                f"{field} is not the JSON text of an object; allowed: a JSON schema", param=field
            )
    return _schema(schema, field)


def text_shape(kind: FormatType, text: str | None, field: str) -> ResponseFormat | None:
    """The shape of a pattern or a grammar."""
    if text is None:
        return None
    if not text:
        raise InvalidRequest(f"{field} is empty; allowed: a {kind.value}", param=field)
    return ResponseFormat(kind, text)


def choice_shape(choices: list[str] | None, field: str) -> ResponseFormat | None:
    """The shape of a closed choice; ``spec`` is the JSON array of the choices."""
    if choices is None:
        return None
    if not choices:
        raise InvalidRequest(f"{field} is an array of 0 items; allowed: 1 item or more", param=field)
    return ResponseFormat(FormatType.CHOICE, json_text(choices))


def _schema(schema: Mapping[str, Any], field: str) -> ResponseFormat:
    check_plain(schema, field)
    return ResponseFormat(FormatType.JSON_SCHEMA, json_text(schema))


def _unwrapped(value: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The schema itself, out of OpenAI's ``{name, schema}`` object or bare."""
    if "schema" not in value:
        return value
    schema = value["schema"]
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{field}.schema is not an object; allowed: a JSON schema", param=f"{field}.schema"
        )
    for name in value:
        if name not in _WRAPPER_FIELDS:
            path = path_of((field, name))
            raise InvalidRequest(f"{path} is not a known field", param=path)
    return schema
