"""A prompt's token ids, which may be thousands: stored in their cached pieces, and joined on demand."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from sys import getsizeof
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from budgeting.token_cache import TokenCache

V = TypeVar("V")


class PieceIds(Sequence[int]):
    """Ids in pieces; equal to the tuple of all ids.

    Most of a conversation was encoded for an earlier request, and a server that gets messages needs only the
    number of ids: joining them for every request would cost as much as the rest of its plan.
    """

    __slots__ = ("_joined", "_length", "_pieces")

    def __init__(self, pieces: Sequence[tuple[int, ...]], length: int) -> None:
        self._pieces = pieces
        self._length = length
        self._joined: tuple[int, ...] | None = None

    @property
    def pieces(self) -> Sequence[tuple[int, ...]]:
        return self._pieces

    @property
    def joined(self) -> tuple[int, ...]:
        if self._joined is None:
            self._joined = tuple(chain.from_iterable(self._pieces))
        return self._joined

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return self.joined[at]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._pieces)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PieceIds):
            return self._length == other._length and self.joined == other.joined
        return self.joined == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.joined)

    def __repr__(self) -> str:
        return f"PieceIds({self._length} ids)"


if TYPE_CHECKING:
    TokenIds = tuple[int, ...] | PieceIds
else:
    TokenIds = tuple[int, ...]  # the type that msgspec decodes them to


def joined(ids: TokenIds) -> tuple[int, ...]:
    return ids if isinstance(ids, tuple) else ids.joined


def leading(ids: TokenIds, count: int) -> tuple[tuple[int, ...], ...]:
    """The first ``count`` ids in pieces, which are not copied but for the last one if it is cut."""
    if isinstance(ids, tuple):
        return (ids[:count],)
    found = []
    for piece in ids._pieces:
        if count <= 0:
            break
        found.append(piece if len(piece) <= count else piece[:count])
        count -= len(piece)
    return tuple(found)


class PerPiece(Generic[V]):
    """What ``make`` returns for a piece of ids, cached for the pieces of ``max_bytes``. Thread-safe.

    By the piece itself, not by its ids: to hash them, or to compare them, would cost as much as most values.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], V], max_bytes: int) -> None:
        self._make = make
        # Each value with its piece, whose address is the key.
        self._cache: TokenCache[tuple[tuple[int, ...], V]] = TokenCache(max_bytes)

    def of(self, ids: TokenIds) -> list[V]:
        """The values of all pieces; the value of ids without pieces is not cached."""
        if isinstance(ids, tuple):
            return [self._make(ids)]
        pieces = ids.pieces
        found = self._cache.get_all(list(map(id, pieces)))
        return [self._new(piece) if one is None else one[1] for piece, one in zip(pieces, found, strict=True)]

    def _new(self, piece: tuple[int, ...]) -> V:
        value = self._make(piece)
        self._cache.put(id(piece), (piece, value), getsizeof(piece) + getsizeof(value))
        return value
