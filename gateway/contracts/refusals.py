"""Validates a body's bytes as a model, and turns the first error into a refusal.

A message names the field's path, what was given (its type, or a short number) and what is allowed.
It never repeats text from the body, except the name of a field, shortened, and the word in a field ``type``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.errors import InvalidJson, InvalidRequest

TAG: Final = "~"  # first character of the tags of a union's branches; tags are left out of paths
MAX_PATH_PART: Final = 64  # most characters of each part of a field's path in a message

MAX_FIELDS: Final = 50_000
"""Most fields of all objects of a body, most objects and most arrays; 300,000 unknown fields block the event
loop for 1 s, 690,000 arrays for 0.6 s."""
FEW_FIELDS_BYTES: Final = MAX_FIELDS * len(b'"":0,')
"""A body up to this size cannot have more fields, so nothing is counted: that costs 1 % of a request."""
MAX_VALUES: Final = 50_000
"""Most values of a free JSON value (``context``, a schema); 1,000,000 block the event loop for 1 s."""
_COUNTED: Final = ((b":", "fields"), (b"[", "arrays"), (b"{", "objects"))
_PIECE_BYTES: Final = 1 << 16  # the text is split at its quotes in pieces, whose parts take little memory

Path = tuple[int | str, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")


class TooManyValues(InvalidRequest, status=422, code="invalid_request"):
    """A free JSON value has more than ``MAX_VALUES`` values."""


class Readable(str):
    """A text that messages may repeat, since it is no prompt: a query parameter's value, or a ``type``."""

    __slots__ = ()


def parse(model: type[ModelT], body: bytes, uncounted_bytes: int = FEW_FIELDS_BYTES) -> ModelT:
    """Validate ``body`` as ``model``; one up to ``uncounted_bytes`` may have more than ``MAX_FIELDS`` fields.

    Raises InvalidRequest (InvalidJson when it is not JSON).
    """
    if len(body) > uncounted_bytes:
        check_fields(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise first_refusal(error.errors(include_url=False), body) from None


def check_fields(body: bytes) -> None:
    """Refuse a body with too many fields, objects or arrays. Raises InvalidRequest."""
    many = [(sign, what) for sign, what in _COUNTED if body.count(sign) > MAX_FIELDS]
    if many:
        bare = b"".join(_outside_strings(body))
        for sign, what in many:
            if (count := bare.count(sign)) > MAX_FIELDS:
                raise InvalidRequest(f"the body has {count} {what}; allowed: {MAX_FIELDS} or fewer")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The text outside of strings, up to where the body is no JSON.

    1,600,000 strings in 4 MB take 60 ms of the event loop, a tenth of a search by regular expression.
    """
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    inside = 0  # whether a piece begins inside of a string
    for start in range(0, len(unescaped), _PIECE_BYTES):
        parts = unescaped[start : start + _PIECE_BYTES].split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1


def first_refusal(errors: Sequence[Any], body: bytes = b"") -> InvalidRequest:
    """The first of pydantic's errors, as an error to raise; ``body`` is used to describe invalid JSON."""
    if errors[0]["type"] == "json_invalid":
        return _not_json(str(errors[0]["ctx"]["error"]), body)
    found = _first(errors)
    path = path_of(_location(found[0]))
    return InvalidRequest(_message(path, found), param=path or None)


def not_allowed(param: str, given: str, allowed: str) -> InvalidRequest:
    """The refusal of a field, whose message says what the field is or has, and what is allowed."""
    return InvalidRequest(f"{param} {given}; allowed: {allowed}", param=param)


def required(value: T | None, param: str) -> T:
    """The value of a field that the types allow to be absent. Raises InvalidRequest if it is absent."""
    if value is None:
        raise InvalidRequest(f"{param} is missing; it is required", param=param)
    return value


def path_of(parts: Sequence[int | str]) -> str:
    """A dotted path; every part is shortened and made printable, for callers choose some of them."""
    return ".".join(_part(part) for part in parts)


def given(value: object) -> str:
    """A description of a value that does not repeat its text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "an integer beyond 64 bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Readable):
        return f"'{path_of([value])}'"
    if isinstance(value, str):
        return f"a string of {_many(len(value), 'character')}"
    if isinstance(value, list):
        return f"an array of {_many(len(value), 'item')}"
    return "an object"


def given_type(value: object) -> str:
    """A description of a ``type``, which repeats it if it is one word."""
    return given(Readable(value) if isinstance(value, str) and value.isidentifier() else value)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _part(part: int | str) -> str:
    text = str(part)
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= MAX_PATH_PART else f"{text[:MAX_PATH_PART]}…"


def _not_json(reason: str, body: bytes) -> InvalidRequest:
    if "hex escape" in reason:
        # A lone surrogate is valid JSON but not valid text; the error names its field.
        path = _surrogate_path(body)
        if path is not None:
            return InvalidRequest(
                f"{path or 'the body'} contains a lone surrogate; allowed: valid Unicode text",
                param=path or None,
            )
    return InvalidJson(f"the body is not valid JSON: {reason}")


def walk(value: Any, name: int | str = "") -> Iterator[tuple[Path, int | str, Any]]:
    """A JSON value and all values in it, in order, each with the path around it and its own key or index.

    Raises TooManyValues.
    """
    count = 0
    pending: list[tuple[Path, int | str, Any]] = [((), name, value)]
    while pending:
        around, key, value = pending.pop()
        yield around, key, value
        if isinstance(value, dict | list):
            count += len(value)
            if count > MAX_VALUES:
                param = path_of((name,))
                raise TooManyValues(
                    f"{param} has more than {MAX_VALUES} values; allowed: {MAX_VALUES}", param=param
                )
            path = (*around, key)
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(path, key, one) for key, one in inner][::-1]


def _surrogate_path(body: bytes) -> str | None:
    try:
        for around, key, value in walk(json.loads(body)):
            try:
                "".join([one for one in (key, value) if isinstance(one, str)]).encode()
            except UnicodeEncodeError:
                return path_of((*around[1:], key))
    except (ValueError, RecursionError, TooManyValues):
        pass
    return None


def _tagged(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith(TAG)


def _location(error: Any) -> tuple[int | str, ...]:
    parts = tuple(part for part in error["loc"] if not _tagged(part))
    return (*parts, *error.get("ctx", {}).get("at", ()))


def _first(errors: Sequence[Any]) -> list[Any]:
    """The first error; for a union, the errors of the branch that was validated furthest: deepest, then to
    the last item.
    """
    loc = errors[0]["loc"]
    cut = next((index for index, part in enumerate(loc) if _tagged(part)), None)
    if cut is None:
        return [errors[0]]
    head = loc[:cut]
    branches = [one for one in errors if one["loc"][:cut] == head and len(one["loc"]) > cut]
    deepest = max(len(_location(one)) for one in branches)
    firsts: dict[int | str, tuple[int | str, ...]] = {}
    for one in branches:
        if len(_location(one)) == deepest:
            firsts.setdefault(one["loc"][cut], _location(one))
    furthest = max(firsts.values(), key=lambda path: [part for part in path if isinstance(part, int)])
    return [one for one in branches if _location(one) == furthest]


def _message(path: str, errors: Sequence[Any]) -> str:
    error = errors[0]
    subject = path or "the body"
    kind, context = error["type"], error.get("ctx", {})
    if (fault := _FAULTS.get(kind)) is not None:
        return f"{subject} {fault.format_map(context)}"
    wanted = dict.fromkeys(allowed(one["type"], one.get("ctx", {})) for one in errors)
    value = error["input"]
    if kind in _RANGES and isinstance(value, str):
        value = Readable(value)  # a form's values are texts; this one is a number
    if kind in _LENGTHS and isinstance(value, dict):
        shown = f"an object of {_many(len(value), 'item')}"
    else:
        shown = given_type(value) if kind == "literal_error" and error["loc"][-1] == "type" else given(value)
    return f"{subject} is {shown}; allowed: {' or '.join(wanted)}"


def allowed(kind: str, context: Mapping[str, Any]) -> str:
    """A description of the allowed values, by pydantic's kind of error and its context."""
    # Our validators' messages begin with these words; other messages may repeat the body's text.
    said = str(context.get("error", ""))
    if kind == "value_error" and said.startswith("allowed: "):
        return said.removeprefix("allowed: ")
    if kind in _LENGTHS:
        bound, item, side = _LENGTHS[kind]
        return f"{_many(context[bound], item)} or {side}"
    return _ALLOWED.get(kind, "a value of the documented type and range").format_map(context)


_FAULTS: Final[Mapping[str, str]] = {
    "missing": "is missing; it is required",
    "unknown_field": "is not a known field",
    "extra_forbidden": "is not a known field",
    "unsupported_field": "is not supported; allowed: {allowed}",
    "null_character": "contains a null character (U+0000); allowed: text without it",
    "unprintable": "is blank or has control characters; allowed: printable text",
}

_TIMES: Final = ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware")
_ALLOWED: Final[Mapping[str, str]] = {
    "string_type": "a string",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "an array"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    **dict.fromkeys(_TIMES, "an ISO 8601 time with an offset, or seconds since 1970"),
    "finite_number": "a finite number",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "string_pattern_mismatch": "what matches {pattern}",
}
_RANGES: Final = frozenset(
    ("finite_number", "greater_than_equal", "greater_than", "less_than_equal", "less_than")
)
# Of each bound of a length: its name in the error's context, what is counted, and the allowed side.
_LENGTHS: Final[Mapping[str, tuple[str, str, str]]] = {
    "too_short": ("min_length", "item", "more"),
    "too_long": ("max_length", "item", "fewer"),
    "string_too_short": ("min_length", "character", "more"),
    "string_too_long": ("max_length", "character", "fewer"),
}
