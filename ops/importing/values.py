"""The intermediate form of another gateway's configuration."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gateway.config.backends import BaseUrl

_BASE_URL: TypeAdapter[str] = TypeAdapter(BaseUrl)


class UnreadableSource(Exception):
    """The other gateway's configuration cannot be read; the message names the place."""


def is_address(url: str) -> bool:
    """Whether ``url`` is a valid address of a worker."""
    try:
        return bool(_BASE_URL.validate_python(url))
    except ValidationError:
        return False


@contextmanager
def values_of(source: str, place: str) -> Iterator[None]:
    """Turn errors from values of a wrong type into UnreadableSource; ``source`` is whose values they are."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        what = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise UnreadableSource(f"{place}: a value of another type than {source} takes ({what})") from None


class ImportOutcome(StrEnum):
    """The outcome of importing a setting."""

    CARRIED = "carried"
    DIFFERENT = "different"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class ImportNote:
    """The outcome of the setting at ``place`` in the source, and what to do about it."""

    place: str
    outcome: ImportOutcome
    text: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """One server that serves a model.

    ``section`` is the rest of its backend's section; equal deployments become one pool. Deployments with a
    lower ``order`` are used first, in proportion to their weights.
    """

    base_url: str | None
    section: Mapping[str, Any]
    weight: float = 1.0
    order: int = 1


@dataclass(slots=True)
class ModelGroup:
    """A model as callers name it; ``weighed_by`` is the source's key of its deployments' weights."""

    name: str
    deployments: list[Deployment] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    weighed_by: str | None = None
    generates: bool = True


@dataclass(slots=True)
class ImportedSetup:
    """The whole configuration: ``sections`` are sections of sluice.yaml, ``timeout_s`` is of each call of a
    deployment that has none of its own."""

    groups: dict[str, ModelGroup] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 0.0
    notes: list[ImportNote] = field(default_factory=list)

    def add(self, model: str, deployment: Deployment) -> None:
        self.groups.setdefault(model, ModelGroup(model)).deployments.append(deployment)

    def set_on_all(self, keys: Mapping[str, Any], *kinds: str) -> None:
        """Set keys in the sections of all backends of these kinds."""
        for group in self.groups.values():
            group.deployments = [
                replace(one, section={**one.section, **keys}) if one.section["kind"] in kinds else one
                for one in group.deployments
            ]

    def note(self, place: str, outcome: ImportOutcome, text: str) -> None:
        self.notes.append(ImportNote(str(place), outcome, text))  # a key in YAML need not be a text

    def carried(self, place: str, text: str) -> None:
        """Note that a setting has the same effect in Sluice."""
        self.note(place, ImportOutcome.CARRIED, text)

    def different(self, place: str, text: str) -> None:
        """Note that Sluice has a similar setting, with a difference."""
        self.note(place, ImportOutcome.DIFFERENT, text)

    def unsupported(self, place: str, text: str) -> None:
        """Note that Sluice has no such setting."""
        self.note(place, ImportOutcome.UNSUPPORTED, text)
