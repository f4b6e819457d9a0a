"""Reads operators' YAML files into pydantic models; an error names the file, the key and the given value."""

import difflib
import re
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from gateway.contracts.refusals import allowed, given, path_of

MAX_FILE_BYTES = 1 << 20  # large enough for thousands of entries, too small for most files given by mistake
MAX_SHOWN = 60  # the most characters of an invalid value that a message shows
# A member of an enum in pydantic's message; operators know only its value.
_MEMBER = re.compile(r"<[\w.]+: ('[^']*')>")
# User, password (which may contain any character) and query of an address, which messages do not repeat.
_SECRET_PARTS = re.compile(r"(?<=//)(?:[^@?\s]*:[^?\s]*|[^/@\s]*)(?=@)|(?<=\?)\S+")

ModelT = TypeVar("ModelT", bound=BaseModel)


class UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key; PyYAML's loader silently uses the last value."""

    # A dependency of vLLM changes PyYAML's own loader for the whole process: a date is a text there.
    yaml_constructors = yaml.SafeLoader.yaml_constructors | {
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping. Raises ConstructorError at the second of two equal keys."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {shown(key.value)} is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        """Build the text. Raises ConstructorError if it has a NUL, with which no file can be opened."""
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            fault = "a text with the character U+0000; allowed: none"
            raise yaml.constructor.ConstructorError(None, None, fault, node.start_mark)
        return super().construct_scalar(node)


def load_yaml(path: Path, error_type: Callable[[str], Exception], *, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """Return the file's parsed content, not yet validated. Raises ``error_type``."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror or type(error).__name__}") from None
    if len(raw) > max_bytes:
        raise error_type(f"{path}: longer than {max_bytes:,} bytes, the most that is allowed")
    try:
        return yaml.load(raw.decode("utf-8-sig"), Loader=UniqueKeyLoader)
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: byte {error.start} is not UTF-8; allowed: UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise error_type(f"{path}{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise error_type(f"{path}: not valid YAML: {reason}") from None


def read_yaml(
    path: Path,
    model: type[ModelT],
    error_type: Callable[[str], Exception],
    *,
    if_empty: object = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> ModelT:
    """Return the file's content as ``model``; an empty file is read as ``if_empty``.

    Raises ``error_type`` with one line for each fault.
    """
    data = load_yaml(path, error_type, max_bytes=max_bytes)
    try:
        return model.model_validate(if_empty if data is None else data)
    except ValidationError as error:
        raise error_type(explain(error, model, lambda loc: str(path))) from None


def explain(
    error: ValidationError, model: type[BaseModel], source: Callable[[tuple[int | str, ...]], str]
) -> str:
    """Return one line for each fault: its source, the key, the allowed values and the given one."""
    return "\n".join(_line(fault, model, source) for fault in error.errors(include_url=False))


def shown(value: object) -> str:
    """Return a value as a message shows it, shortened to ``MAX_SHOWN``, an address without its secrets."""
    if isinstance(value, dict | list):
        return given(value)
    text = repr(without_secrets(value) if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def without_secrets(text: str) -> str:
    """Return a text without the passwords and queries of its addresses."""
    return _SECRET_PARTS.sub("…", text) if "//" in text else text


def _line(fault: Any, model: type[BaseModel], source: Callable[[tuple[int | str, ...]], str]) -> str:
    loc, sections = _found(model, fault["loc"])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{path_of((part,))}" for part in loc)
    key = key.removeprefix(".")
    where, kind = source(loc), fault["type"]
    if kind == "extra_forbidden":
        names = sorted({name for section in sections for name in section.model_fields})
        close = difflib.get_close_matches(str(loc[-1]), names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return f"{where}: unknown key {key!r}{hint}; allowed: {', '.join(names)}"
    if kind == "value_error":  # raised by Sluice's own validators, whose messages name the given value
        return f"{where}: {key}{': ' if key else ''}{fault['ctx']['error']}"
    described = given if "headers" in loc else shown  # a header may be a key
    value = "" if kind == "missing" else f"; given: {described(fault['input'])}"
    if kind == "too_short":
        return f"{where}: {key}: allowed: {allowed(kind, fault['ctx'])}{value}"
    if kind == "union_tag_invalid":  # the fault is that of the mapping which holds the tag
        ctx = fault["ctx"]
        tags = f"allowed: {ctx['expected_tags']}; given: {shown(ctx['tag'])}"
        return f"{where}: {key}.{ctx['discriminator'].strip(chr(39))}: {tags}"
    if kind == "union_tag_not_found":
        return f"{where}: {key}.{fault['ctx']['discriminator'].strip(chr(39))}: Field required"
    message = _MEMBER.sub(r"\1", fault["msg"].partition(" or instance of ")[0])  # without the name of a class
    if key and fault["input"] is None and kind in ("model_type", "dict_type"):
        value += ", since it has no keys; leave it out"
    if kind in ("model_type", "dict_type", "list_type", "tuple_type") and where.startswith("environment "):
        value += """; allowed in a variable: JSON, as ["a", "b"] or {"a": 1}"""
    if kind == "tuple_type":
        message = "Input should be a valid list"  # YAML has no tuples
    if kind == "string_pattern_mismatch" and "https?://" in (pattern := fault["ctx"]["pattern"]):
        message = "is no address; allowed: http://HOST:PORT or https://HOST, with the path where there is one"
        if r"\*" in pattern:
            message = "is no origin; allowed: http://HOST:PORT or https://HOST, without a path, or *"
    return f"{where}: {key or 'the file'}: {message}{value}"


def _found(
    model: type[BaseModel], loc: Sequence[int | str]
) -> tuple[tuple[int | str, ...], list[type[BaseModel]]]:
    """Return a fault's keys without pydantic's union tags, and the models that may hold the last key."""
    keys: list[int | str] = []
    at: list[Any] = [model]
    sections: list[type[BaseModel]] = []
    for part in loc:
        kinds = [one for one in at if _is(one, BaseModel) and "kind" in one.model_fields]
        tagged = [one for one in kinds if part in get_args(one.model_fields["kind"].annotation)]
        if tagged and len(kinds) > 1:  # else it is a key with the name of a kind
            at = tagged
        elif part != "[key]" and not all(get_origin(one) is Literal or _is(one, Enum) for one in at):
            keys.append(part)
            sections = [one for one in at if _is(one, BaseModel)]
            at = [arm for one in at for arm in arms(_inner(one, part))]
    return tuple(keys), sections


def _is(annotation: Any, kind: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, kind)


def _inner(annotation: Any, part: int | str) -> Any:
    """Return the type of a field, of a mapping's values or of a list's items."""
    if _is(annotation, BaseModel):
        field = annotation.model_fields.get(part)
        return None if field is None else field.annotation
    # The last type argument of a mapping is its value type; the first of a list is its item type.
    return next(iter(get_args(annotation)[-1 if isinstance(part, str) else 0 :]), None)


def arms(annotation: Any) -> list[Any]:
    """Return the members of a union, or the type itself, without ``Annotated``."""
    if get_origin(annotation) is Annotated:
        return arms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [arm for one in get_args(annotation) for arm in arms(one)]
    return [annotation]
