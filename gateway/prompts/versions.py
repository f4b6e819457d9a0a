"""Registered prompt versions: one YAML file each, read and validated at start, immutable afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import structlog
from pydantic import ConfigDict, Field

from budgeting.values import SectionBudgets, SummaryKind
from gateway.config.budgets import BudgetsSection
from gateway.config.section import OffIsAWord, Section
from gateway.config.volatile import VolatilePolicy
from gateway.config.yaml_file import read_yaml
from gateway.errors import UnknownPromptVersion

DEFAULT_FOLDER = "prompts"
# Limits of a folder; a prompt version is usually a page of text.
MAX_FILE_BYTES = 262_144
MAX_VERSIONS = 1_000
_NAMED_IDS = 10  # the most ids that an error names

_Text = Annotated[str, Field(max_length=MAX_FILE_BYTES)]


class PromptFileError(ValueError):
    """A prompt version's file cannot be used; the message names file, key, what is given and allowed."""


@dataclass(frozen=True, slots=True)
class PromptVersion:
    """A published prompt.

    ``policy`` and ``grounding_rule`` (how the model uses evidence) may be empty; without ``budgets`` nothing
    is trimmed; ``reserve`` are tokens for the answer (``None``: the model's default); ``volatile`` is what to
    do with volatile content in callers' system messages (``None``: as configured for the contract);
    ``sha256`` is the hash of all fields, independent of comments and layout of the file.
    """

    id: str
    system: str
    policy: str = ""
    grounding_rule: str = ""
    budgets: SectionBudgets | None = None
    reserve: int | None = None
    summarizer: SummaryKind = SummaryKind.EXTRACTIVE
    volatile: VolatilePolicy | None = None
    sha256: str = ""


class _VersionFile(Section):
    model_config = ConfigDict(strict=True)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    system: Annotated[_Text, Field(min_length=1)]
    policy: _Text = ""
    grounding_rule: _Text = ""
    budgets: BudgetsSection | None = None
    reserve: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    summarizer: Annotated[SummaryKind, Field(strict=False)] = SummaryKind.EXTRACTIVE
    volatile: Annotated[VolatilePolicy | None, Field(strict=False), OffIsAWord] = None

    def version(self) -> PromptVersion:
        budgets = None if self.budgets is None else self.budgets.sections
        version = PromptVersion(**{**dict(self), "budgets": budgets})
        return replace(version, sha256=_sha256(version))


def _sha256(version: PromptVersion) -> str:
    """Return the hash of a version's fields; later added fields count only if not at their default."""
    # Versions without budgets were published with the default ones.
    body = asdict(replace(version, budgets=version.budgets or SectionBudgets()))
    del body["sha256"]
    for later in _LATER_KEYS:
        if body[later.name] == later.default:
            del body[later.name]
    text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# Fields added later; versions published before keep their hash.
_LATER_KEYS = tuple(one for one in fields(PromptVersion) if one.name in ("summarizer", "volatile"))


class PromptVersions:
    """The registered versions, by id."""

    def __init__(
        self, versions: Iterable[PromptVersion] = (), files: Mapping[str, Path] = MappingProxyType({})
    ) -> None:
        self._by_id: Mapping[str, PromptVersion] = MappingProxyType({v.id: v for v in versions})
        self._files = files

    @classmethod
    def from_folder(cls, path: str | Path) -> PromptVersions:
        """Read every ``*.yaml`` of a folder. Blocks on disk.

        Raises PromptFileError if a file cannot be read or is invalid, or two files have the same id.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise PromptFileError(
                f"{path}: no such folder; allowed in prompts.folder: a folder of *.yaml files"
            )
        files = sorted(folder.glob("*.yaml"))
        if len(files) > MAX_VERSIONS:
            raise PromptFileError(f"{path}: {len(files)} prompt versions; allowed: up to {MAX_VERSIONS}")
        found: dict[str, Path] = {}
        versions = []
        for file in files:
            version = read_yaml(file, _VersionFile, PromptFileError, max_bytes=MAX_FILE_BYTES).version()
            if version.id in found:
                raise PromptFileError(
                    f"{file}: id: given {version.id!r}, which {found[version.id]} has; allowed: an id once"
                )
            found[version.id] = file
            versions.append(version)
        return cls(versions, MappingProxyType(found))

    @classmethod
    def configured(cls, folder: str | None) -> PromptVersions:
        """Read ``prompts.folder``; if unset, the folder ``prompts``, if it exists.

        Raises the errors of :meth:`from_folder`.
        """
        if folder is None and not Path(DEFAULT_FOLDER).exists():
            structlog.get_logger("prompts").info(
                "there is no folder prompts and prompts.folder is not set: no prompt versions are registered"
            )
            return cls()
        return cls.from_folder(folder or DEFAULT_FOLDER)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_id))

    @property
    def all(self) -> tuple[PromptVersion, ...]:
        return tuple(self._by_id[version_id] for version_id in self.ids)

    def file_of(self, version_id: str) -> str:
        return str(self._files.get(version_id, version_id))

    def get(self, version_id: str) -> PromptVersion:
        """Return the version of that id. Raises UnknownPromptVersion, which names the known ones."""
        version = self._by_id.get(version_id)
        if version is None:
            listed = ", ".join(self.ids[:_NAMED_IDS]) or "none"
            more = ", …" if len(self.ids) > _NAMED_IDS else ""
            raise UnknownPromptVersion(
                f"prompt version {version_id[:128]!r} is not registered; known: {listed}{more}",
                param="prompt_version",
            )
        return version
