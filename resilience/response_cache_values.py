"""Values and events of the response cache, and the ports of its store and its embedder."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import mul
from typing import Protocol

# Answers on one shelf, the newest: questions of one scope with the same facts. Searching so many takes less
# than a millisecond.
MAX_SHELF = 64


@dataclass(frozen=True, slots=True)
class CacheQuestion:
    """A question. Requests of one ``key`` are equal; those of one ``scope`` differ in ``text`` alone.

    ``text`` is the latest user turn; ``None`` when only an exact match counts.
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
    """A stored answer that fits, ``exact`` when found by its key; the questions' ``similarity`` is 1 then."""

    kept: CachedAnswer
    similarity: float
    age_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it is stored.

    Args:
        put_at: when, on the cache's clock.
        shelf: where similar questions find it; ``None``: found by its key alone.
        vector: of its question, 32-bit floats, little-endian.
    """

    key: str
    kept: CachedAnswer
    put_at: float
    shelf: str | None = None
    vector: bytes = b""


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

    async def shelf(self, shelf: str) -> Sequence[tuple[str, bytes]]:
        """Keys and vectors of the newest entries of a shelf, at most ``MAX_SHELF``."""

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        """Keep entries; each replaces an older one of its key."""

    def figures(self) -> CacheFigures | None:
        """Its figures; ``None`` where another service reports them."""

    async def close(self) -> None:
        """Close connections."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a question means, as far as an embedder can tell.

    Args:
        facts: what a similar question must contain too, word by word.
        vector: of length 1; empty when nothing of the text is known.
        threshold: least similarity at which a question with these facts counts as the same.
    """

    facts: tuple[str, ...]
    vector: tuple[float, ...]
    threshold: float

    def similarity(self, other: Sequence[float]) -> float:
        """The cosine with the other vector; 1 when both are empty, 0 when one is."""
        if not self.vector or not other:
            return 1.0 if not self.vector and not other else 0.0
        return float(sum(map(mul, self.vector, other)))


class Embedder(Protocol):
    """Embeds texts.

    Invariants: thread-safe; equal texts have equal meanings; a text is similar to itself; blocking and
    called from a thread; raises nothing.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the model: vectors of two models are never compared."""

    def meaning(self, text: str) -> Meaning | None:
        """What ``text`` means; ``None`` when that cannot be said."""


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
