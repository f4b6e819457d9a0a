"""Values and events of the response cache, and the port of its store."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that may be given again."""

    text: str
    finish_reason: str
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it is stored; ``put_at``: when, on the cache's clock."""

    key: str
    kept: CachedAnswer
    put_at: float


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Number and bytes of stored answers."""

    entries: int
    bytes: int


class StoreError(Exception):
    """The store failed; ``error_type`` is the class of the cause."""

    def __init__(self, error_type: str) -> None:
        self.error_type = error_type
        super().__init__(error_type)


class Store(Protocol):
    """Stores answers; raises only :class:`StoreError`. Bounded in number, bytes and age."""

    async def get(self, key: str) -> StoredAnswer | None:
        """The entry of that key."""

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        """Keep entries; each replaces an older one of its key."""

    def figures(self) -> CacheFigures | None:
        """Its figures; ``None`` where another service reports them."""

    async def close(self) -> None:
        """Close connections."""


class Lookup(StrEnum):
    """How a look into the cache ended."""

    EXACT = "exact"
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
