"""The adapter registry's YAML file.

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
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from adapters.errors import RegistryFileError
from adapters.values import Adapter
from gateway.config.section import Section
from gateway.config.yaml_file import read_yaml, shown

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_Text = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$")]
# vLLM and the embedded engine store the id in a signed 32-bit integer.
_EngineId = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Strict(Section):
    model_config = ConfigDict(strict=True)


class _AdapterEntry(_Strict):
    id: _Name
    base_model: _Text
    path: _Text
    engine_id: _EngineId | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class _RegistryFile(_Strict):
    adapters: Annotated[list[_AdapterEntry], Field(max_length=10_000)] = Field(default=[])
    aliases: dict[_Name, _Name] = Field(default={})

    @model_validator(mode="after")
    def _names_and_numbers_differ(self) -> Self:
        by_name: dict[str, int] = {}
        by_number: dict[int, int] = {}
        for index, entry in enumerate(self.adapters):
            if (other := by_name.setdefault(entry.id, index)) != index:
                raise ValueError(f"adapters[{index}].id: {entry.id!r} is used by adapters[{other}]")
            number = entry.engine_id
            if number is not None and (other := by_number.setdefault(number, index)) != index:
                raise ValueError(f"adapters[{index}].engine_id: {number} is used by adapters[{other}]")
        if max(by_number, default=0) + len(self.adapters) - len(by_number) >= 2**31:
            raise ValueError("engine_id: give every adapter a number; the next ones would be too large")
        for alias, target in self.aliases.items():
            if alias in by_name:
                raise ValueError(f"aliases.{alias}: an alias is no adapter's id")
            if target not in by_name:
                listed = ", ".join(list(by_name)[:10]) or "none, the file has no adapters"
                raise ValueError(f"aliases.{alias}: {shown(target)} is no adapter's id; known: {listed}")
        return self


@dataclass(frozen=True, slots=True)
class RegistryContent:
    """The content of a registry file."""

    adapters: tuple[Adapter, ...]
    aliases: Mapping[str, str]


def read_registry_file(path: Path) -> RegistryContent:
    """Read and check a registry file. Raises RegistryFileError.

    An adapter without ``engine_id`` gets the next number above all given ones, in the file's order.
    """
    file = read_yaml(
        path, _RegistryFile, lambda text: RegistryFileError(f"adapters.file: {text}"), if_empty={}
    )
    highest = max((entry.engine_id or 0 for entry in file.adapters), default=0)
    adapters = []
    for entry in file.adapters:
        if (number := entry.engine_id) is None:
            number = highest = highest + 1
        adapters.append(
            Adapter(entry.id, number, entry.base_model, entry.path, MappingProxyType(dict(entry.labels)))
        )
    return RegistryContent(tuple(adapters), MappingProxyType(dict(file.aliases)))
