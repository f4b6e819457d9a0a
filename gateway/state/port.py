"""What the gateway needs of a state store: append-only streams, numbered, told of as they grow.

A stream's records are numbered 1, 2, 3 … without gaps and never change. The routing in force,
the adapters, the keys are what their streams' records add up to; a rollback is a further record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import orjson

from gateway.state.errors import RecordTooLarge

MAX_RECORD_BYTES: Final = 1 << 20
"""Longest record: a routing file of thousands of routes fits; what is larger belongs into a file."""
MAX_READ: Final = 1_000
"""Most records of one read."""
MAX_AUTHOR: Final = 256
"""Longest author, in characters."""
STREAM_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""What streams may be called: a name is a part of Redis keys and of file names too."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a stream.

    Args:
        stream: its stream.
        number: its place there, from 1.
        at: when it was written, by the writer's clock, seconds since 1970; not necessarily rising.
        author: who wrote it, as the admin API knows him.
        data: JSON in UTF-8, at most ``MAX_RECORD_BYTES``.
    """

    stream: str
    number: int
    at: float
    author: str
    data: bytes


class StateStore(Protocol):
    """Streams that several processes, or machines, append to and follow.

    Invariants: the numbers of a stream are 1 to its head without gaps; two appends with one ``expected``
    never both succeed; what was read once is read for ever, unless it was forgotten. An append that has
    returned is seen by every later read of every process, and survives the end of all of them.
    """

    @property
    def healthy(self) -> bool:
        """Whether the store was reached when it was last asked; false until it is."""

    async def open(self) -> None:
        """Prepare; a store that is away is tried again by what comes later, and is not an error here."""

    async def close(self) -> None:
        """Let go of connections. ``run`` has ended before."""

    async def append(self, stream: str, data: bytes, *, author: str, expected: int | None = None) -> Record:
        """Add a record after the one numbered ``expected``, or at the end whatever is there when ``None``.

        Raises:
            Conflict: the stream's head is not ``expected`` (0: an empty stream).
            RecordTooLarge: ``data`` is longer than ``MAX_RECORD_BYTES``.
            StateUnavailable: the store is away; the record may have been written.
            ValueError: ``data`` is not JSON, or the stream's or author's name is not allowed.
        """

    async def read(
        self, stream: str, *, after: int = 0, limit: int = MAX_READ, newest_first: bool = False
    ) -> Sequence[Record]:
        """At most ``limit`` records numbered above ``after``; none for a stream that is not there.

        Raises:
            StateUnavailable: the store is away.
            ValueError: ``limit`` is not 1 to ``MAX_READ``, or ``after`` is negative.
        """

    async def forget(self, stream: str, up_to: int) -> None:
        """Let go of the records up to that number; later ones keep theirs, and the head is what it was.

        For streams that are read once and that nobody follows: a follower begins at 1.

        Raises:
            StateUnavailable: the store is away.
            ValueError: ``up_to`` is negative.
        """

    async def heads(self) -> Mapping[str, int]:
        """The last number of each stream. Raises StateUnavailable."""

    def listen(self, stream: str, listener: Callable[[int], None]) -> None:
        """Have ``told`` called with the stream's head, on the event loop, while ``run`` runs.

        Soon after an append by anybody, and at least at every poll whether there is something new or not; so
        it may be told twice, or of an old number, but misses nothing for longer than a poll. 0 is said of a
        stream that is not there. ``told`` must neither block nor raise.
        """

    async def run(self) -> None:
        """Watch, and call listeners, until cancelled; outlives every failure of the store."""


def check_record(stream: str, data: bytes, author: str) -> None:
    """Refuse what no store takes. Raises RecordTooLarge, ValueError."""
    if STREAM_NAME.fullmatch(stream) is None:
        raise ValueError(f"stream: given {stream!r}; allowed: {STREAM_NAME.pattern}")
    if not 1 <= len(author) <= MAX_AUTHOR:
        raise ValueError(f"author: given {len(author)} characters; allowed: 1 to {MAX_AUTHOR}")
    if len(data) > MAX_RECORD_BYTES:
        raise RecordTooLarge(stream, len(data), MAX_RECORD_BYTES)
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        raise ValueError(f"stream {stream!r}: given a record that is not JSON in UTF-8") from None


def check_forget(up_to: int) -> None:
    """Refuse what is no number. Raises ValueError."""
    if up_to < 0:
        raise ValueError(f"up_to: given {up_to}; allowed: from 0")


def check_read(after: int, limit: int) -> None:
    """Refuse a read without a bound. Raises ValueError."""
    if after < 0 or not 1 <= limit <= MAX_READ:
        raise ValueError(f"given after={after}, limit={limit}; allowed: after from 0, limit 1 to {MAX_READ}")


class FollowsStream(Protocol):
    """What is needed of a follower."""

    async def caught_up_to(self, number: int, timeout_s: float) -> bool:
        """Whether that record is in force here in time."""
