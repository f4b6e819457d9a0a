"""Values and events of the response cache, and the ports of its store and its embedder."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

MAX_SHELF: Final = 64
"""Most questions of a shelf; the newest are stored. Each lookup compares with all of them."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that may share an answer with similar questions.

    Args:
        shelf: digest of all that similar questions must have in common; different shelves are never compared.
        model: the embedding model that computes the vector.
        threshold: least cosine with another question whose answer this one may get.
    """

    text: str
    shelf: str
    tenant: str
    model: str
    threshold: float


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that may be served again; ``similarity``: that of its question, if it is a similar one."""

    text: str
    finish_reason: str
    reasoning: str | None = None
    similarity: float | None = None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it is stored.

    Args:
        put_at: time of storing, on the cache's clock.
        shelf: the shelf on which similar questions find the answer; ``None``: only its key finds it.
        vector: the question's vector of length 1, as little-endian 32-bit floats.
    """

    key: str
    answer: CachedAnswer
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
        """Keys and vectors of a shelf's newest entries, at most ``MAX_SHELF``; some entries may be gone."""

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        """Store entries; each replaces an older one of its key."""

    def figures(self) -> CacheFigures | None:
        """The store's figures; ``None`` if another service reports them."""

    async def close(self) -> None:
        """Close connections."""


class EmbedderError(Exception):
    """No vectors were made; the message is the class of the cause."""


class Embedder(Protocol):
    """Computes vectors of questions; raises only :class:`EmbedderError`. The caller bounds the time."""

    async def embed(self, tenant: str, model: str, texts: Sequence[str]) -> Sequence[bytes]:
        """A vector for each text, as little-endian 32-bit floats; ``tenant`` is the one that asked."""


class Lookup(StrEnum):
    """The result of a lookup; ``NO_VECTOR``: similar questions could not be searched."""

    EXACT = "exact"
    SIMILAR = "similar"
    MISS = "miss"
    NO_VECTOR = "no_vector"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A lookup in the cache has ended with the result ``kind``."""

    kind: Lookup


@dataclass(frozen=True, slots=True)
class AnswersLost:
    """Answers that were not stored; ``reason``: ``outbox_full``, ``store`` (it failed), ``defect``, or
    ``no_vector``: stored, but found only by the same question.
    """

    count: int
    reason: str
    error_type: str = ""


@dataclass(frozen=True, slots=True)
class StoreBroke:
    """The store failed after it had worked."""

    error_type: str


@dataclass(frozen=True, slots=True)
class StoreIsBack:
    """The store works again."""


CacheEvent = LookedUp | AnswersLost | StoreBroke | StoreIsBack
