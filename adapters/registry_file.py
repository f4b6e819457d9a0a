"""The registry's YAML file: read, checked, and turned into values.

::

    adapters:
      - {id: manga_domain_v3, engine_id: 1, base_model: demo, path: models/adapters/manga_domain_v3,
         labels: {domain: manga}}
    aliases: {manga_domain: manga_domain_v3}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adapters.errors import RegistryFileError
from adapters.values import Adapter

# An entry is about 200 bytes: enough for thousands of adapters, too small for most files given by mistake.
MAX_FILE_BYTES = 1_048_576
MAX_ADAPTERS = 10_000
# Longest part of a wrong value in a message.
MAX_SHOWN = 60

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_NAME_ALLOWED = "1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first"
_TEXT_ALLOWED = "a text of 1 to 1,024 characters"

# The allowed values by key, for messages.
_ALLOWED: Mapping[str, str] = MappingProxyType(
    {
        "adapters": f"a list of at most {MAX_ADAPTERS:,} adapters",
        "aliases": f"a mapping of alias to adapter id, each {_NAME_ALLOWED}",
        "id": _NAME_ALLOWED,
        "engine_id": "a whole number from 1 to 2,147,483,647",
        "base_model": _TEXT_ALLOWED,
        "path": _TEXT_ALLOWED,
        "labels": "a mapping of text to text",
    }
)
_ADAPTER_KEYS = "id, engine_id, base_model, path, labels"
_FILE_KEYS = "adapters, aliases"

_Name = Annotated[str, Field(pattern=_NAME)]
_Text = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$")]
# vLLM and the embedded engine keep the id in a signed 32-bit integer.
_EngineId = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _AdapterEntry(_Strict):
    id: _Name
    base_model: _Text
    path: _Text
    engine_id: _EngineId | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class _RegistryDocument(_Strict):
    adapters: list[_AdapterEntry] = Field(default_factory=list, max_length=MAX_ADAPTERS)
    aliases: dict[_Name, _Name] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegistryContent:
    """The content of a registry file."""

    adapters: tuple[Adapter, ...]
    aliases: Mapping[str, str]


def read_registry_file(path: Path) -> RegistryContent:
    """Read and check a registry file. Raises :class:`RegistryFileError` at the first problem.

    An adapter without ``engine_id`` gets the next number above all given ones, in the file's order.
    """
    document = _validated(path, _parsed(path, _text(path)))
    _check_names(path, document)
    return RegistryContent(_adapters(path, document), MappingProxyType(dict(document.aliases)))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise RegistryFileError(f"{path}: cannot be read: {why}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise RegistryFileError(f"{path}: longer than {MAX_FILE_BYTES:,} bytes, the most that is allowed")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RegistryFileError(f"{path}: byte {error.start} is not UTF-8; allowed: UTF-8 text") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, where YAML's own silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; raises ConstructorError at the second of two equal keys."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value.__hash__ is not None:
                if (key_node.tag, key_node.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {_shown(key_node.value)} is given twice", key_node.start_mark
                    )
                seen.add((key_node.tag, key_node.value))
        return super().construct_mapping(node, deep)


def _parsed(path: Path, text: str) -> object:
    try:
        # A subclass of SafeLoader: plain data only, no objects are made.
        parsed: object = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RegistryFileError(f"{path}{where}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RegistryFileError(f"{path}: not valid YAML: {type(error).__name__}") from error
    return {} if parsed is None else parsed


def _validated(path: Path, parsed: object) -> _RegistryDocument:
    try:
        return _RegistryDocument.model_validate(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place, kind = first["loc"], first["type"]
    if kind == "extra_forbidden":
        allowed = _ADAPTER_KEYS if len(place) > 1 else _FILE_KEYS
        raise RegistryFileError(f"{path}: {_key(place)} is no known key; allowed: {allowed}")
    given = "nothing" if kind == "missing" else _shown(first["input"])
    raise _wrong(path, _key(place), given, _allowed(place))


def _check_names(path: Path, document: _RegistryDocument) -> None:
    by_name: dict[str, int] = {}
    by_number: dict[int, int] = {}
    for index, entry in enumerate(document.adapters):
        if (other := by_name.setdefault(entry.id, index)) != index:
            raise _wrong(
                path, f"adapters[{index}].id", _shown(entry.id), f"a name not used by adapters[{other}]"
            )
        if entry.engine_id is None:
            continue
        if (other := by_number.setdefault(entry.engine_id, index)) != index:
            raise _wrong(
                path,
                f"adapters[{index}].engine_id",
                str(entry.engine_id),
                f"a number not used by adapters[{other}]",
            )
    for alias, target in document.aliases.items():
        if alias in by_name:
            raise _wrong(path, f"aliases.{alias}", _shown(alias), "an alias that is no adapter's id")
        if target not in by_name:
            listed = ", ".join(list(by_name)[:10]) or "none, the file has no adapters"
            raise _wrong(path, f"aliases.{alias}", _shown(target), f"the id of an adapter: {listed}")


def _adapters(path: Path, document: _RegistryDocument) -> tuple[Adapter, ...]:
    highest = max((entry.engine_id or 0 for entry in document.adapters), default=0)
    adapters = []
    for index, entry in enumerate(document.adapters):
        engine_id = entry.engine_id
        if engine_id is None:
            engine_id = highest = highest + 1
            if engine_id >= 2**31:
                raise _wrong(path, f"adapters[{index}].engine_id", "nothing", "a number not used by others")
        adapters.append(
            Adapter(entry.id, engine_id, entry.base_model, entry.path, MappingProxyType(dict(entry.labels)))
        )
    return tuple(adapters)


def _wrong(path: Path, key: str, given: str, allowed: str) -> RegistryFileError:
    return RegistryFileError(f"{path}: {key}: given {given}; allowed: {allowed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _key(place: tuple[int | str, ...]) -> str:
    key = ""
    for part in place:
        if part != "[key]":  # pydantic's mark for "the key itself is wrong"
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key or "the file"


def _allowed(place: tuple[int | str, ...]) -> str:
    allowed = f"a mapping with the keys {_ADAPTER_KEYS if place else _FILE_KEYS}"
    for part in place:
        # A list's item is a mapping of its own; below labels and aliases the keys are free.
        if part in _ALLOWED:
            allowed = _ALLOWED[str(part)]
        elif isinstance(part, int):
            allowed = f"a mapping with the keys {_ADAPTER_KEYS}"
        if part in ("labels", "aliases"):
            break
    return allowed
