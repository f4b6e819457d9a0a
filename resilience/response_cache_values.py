"""What the response cache keeps, what it is asked, what it tells, and the port of where it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# Answers on one shelf, the newest: questions of one scope with the same facts. Searching so many takes less
# than a millisecond.
MAX_SHELF = 64


@dataclass(frozen=True, slots=True)
class CacheQuestion:
    """What was asked.

    Args:
        key: the same for two requests only when they ask for the same in every respect.
        scope: the same for two requests only when they differ in nothing but ``text``.
        text: the latest user turn; ``None`` when only an exact match will do.
    """

    key: str
    scope: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that may be given again; ``similar``: also to a similar question."""

    text: str
    finish_reason: str
    similar: bool = True


@dataclass(frozen=True, slots=True)
class Hit:
    """A kept answer that fits.

    Args:
        similarity: of the two questions; 1 when they are the same.
        age_s: seconds since it was kept.
        exact: found by its key.
    """

    kept: CachedAnswer
    similarity: float
    age_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it is stored.

    Args:
        put_at: when, on the cache's clock.
        shelf: where similar questions look for it; ``None``: found by its key alone.
        vector: what its question means, 32-bit floats, little-endian.
    """

    key: str
    kept: CachedAnswer
    put_at: float
    shelf: str | None = None
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What is kept now, in number and in bytes."""

    entries: int
    bytes: int


class StoreError(Exception):
    """The store could not be asked; ``error_type`` is the class of the error behind it."""

    def __init__(self, error_type: str) -> None:
        self.error_type = error_type
        super().__init__(error_type)


class Store(Protocol):
    """Where answers are kept. Everything may raise :class:`StoreError` and nothing else.

    Bounded in number, bytes and age; an entry that is too old is never given.
    """

    async def get(self, key: str) -> StoredAnswer | None:
        """The entry of that key."""

    async def shelf(self, shelf: str) -> Sequence[tuple[str, bytes]]:
        """Keys and vectors of the newest entries of a shelf, at most ``MAX_SHELF``."""

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        """Keep entries; each replaces an older one of its key."""

    def figures(self) -> CacheFigures | None:
        """What is kept; ``None`` where that is for another service to tell."""

    async def close(self) -> None:
        """Let go of connections."""


class Lookup(StrEnum):
    """How a look into the cache ended."""

    EXACT = "exact"
    SIMILAR = "similar"
    MISS = "miss"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The cache was asked."""

    kind: Lookup


@dataclass(frozen=True, slots=True)
class AnswersLost:
    """Answers that were not kept; ``reason``: ``outbox_full``, ``store`` (it failed) or ``defect``."""

    count: int
    reason: str
    error_type: str = ""


@dataclass(frozen=True, slots=True)
class StoreBroke:
    """The store failed, having worked before."""

    error_type: str


@dataclass(frozen=True, slots=True)
class StoreIsBack:
    """The store works again."""


CacheEvent = LookedUp | AnswersLost | StoreBroke | StoreIsBack
