"""Values and events of the response cache, and the ports of its store and its embedder."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

MAX_SHELF: Final = 64
"""Most questions of a shelf, the newest. Each lookup compares all of them."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer similar questions may share.

    Args:
        shelf: digest of all that they must have in common; questions of two shelves are never compared.
        model: the embedding model that makes its vector.
        threshold: least cosine with the question of an answer that it is given.
    """

    text: str
    shelf: str
    tenant: str
    model: str
    threshold: float


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that may be given again; ``similarity``: of its question, where that is another one."""

    text: str
    finish_reason: str
    reasoning: str | None = None
    similarity: float | None = None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as it is stored.

    Args:
        put_at: when, on the cache's clock.
        shelf: where similar questions find it; ``None``: it is found by its key alone.
        vector: of its question, of length 1, as little-endian 32-bit floats.
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
        """Keys and vectors of the newest entries of a shelf, at most ``MAX_SHELF``; some may be gone."""

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        """Keep entries; each replaces an older one of its key."""

    def figures(self) -> CacheFigures | None:
        """Its figures; ``None`` where another service reports them."""

    async def close(self) -> None:
        """Close connections."""


class EmbedderError(Exception):
    """No vectors were made; ``error_type`` is the class of the cause."""

    def __init__(self, error_type: str) -> None:
        self.error_type = error_type
        super().__init__(error_type)


class Embedder(Protocol):
    """Makes vectors of questions; raises only :class:`EmbedderError`. The caller bounds the time."""

    async def embed(self, tenant: str, model: str, texts: Sequence[str]) -> Sequence[bytes]:
        """A vector for each text, as little-endian 32-bit floats; ``tenant`` is who asked them."""


class Lookup(StrEnum):
    """How a look into the cache ended; ``NO_VECTOR``: a similar question could not be looked for."""

    EXACT = "exact"
    SIMILAR = "similar"
    MISS = "miss"
    NO_VECTOR = "no_vector"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The cache was asked."""

    kind: Lookup


@dataclass(frozen=True, slots=True)
class AnswersLost:
    """Answers that were not kept; ``reason``: ``outbox_full``, ``store`` (it failed), ``defect``, or
    ``no_vector``: they are kept, for the same question only.
    """

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
