"""The interface of a state store: append-only, numbered streams that notify listeners.

A stream's records are numbered 1, 2, 3 … without gaps and never change. The routing in force, the adapters
and the keys are computed from the records of their streams; a rollback is a further record.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from gateway.state.errors import RecordTooLarge, StateUnavailable

MAX_RECORD_BYTES: Final = 1 << 20  # bytes of the longest record; a routing file of thousands of routes fits
POLL_S: Final = 1.0  # default of the longest time between two calls of a listener, in seconds
MAX_READ: Final = 1_000  # most records of one read
MAX_AUTHOR: Final = 256  # longest author, in characters


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a stream, whose name is also a part of Redis keys and of file names.

    Args:
        number: its position in the stream, from 1.
        at: when it was written, in seconds since 1970 by the writer's clock; may decrease.
        author: the id of the writing key, or the name of a part of the gateway.
        data: JSON in UTF-8, at most ``MAX_RECORD_BYTES``.
    """

    stream: str
    number: int
    at: float
    author: str
    data: bytes


class StateStore(ABC):
    """Streams to which several processes, also on several machines, append, and which they follow.

    Invariants: the numbers of a stream are 1 to its head without gaps; of two appends with the same
    ``expected`` at most one succeeds; a record never changes, but may be deleted by ``forget``. An append
    that has returned is visible to every later read of every process, and survives the end of all processes.
    ``healthy``: the last operation reached the store. ``refuses_writes``: the last write failed though the
    store can be read, as on a full disk.

    Args:
        shown: the store's url without its password.
        unix_time: seconds since 1970.
        poll_s: longest time between two calls of a listener.
    """

    def __init__(self, shown: str, unix_time: Callable[[], float], poll_s: float) -> None:
        self._shown = shown
        self._unix_time = unix_time
        self._poll_s = poll_s
        # Listeners are registered only at the start, so their number is bounded.
        self._listeners: dict[str, list[Callable[[int], None]]] = {}
        self._announcement_listeners: dict[str, list[Callable[[str], None]]] = {}
        self._log = structlog.get_logger("state")
        self._away = False
        self.healthy = self.refuses_writes = False

    async def open(self) -> None:
        """Connect to the store. An unreachable store is not an error here: later operations try again."""
        with contextlib.suppress(StateUnavailable):
            await self.heads()

    @abstractmethod
    async def close(self) -> None:
        """Close connections; ``run`` must have ended."""

    @abstractmethod
    async def append(self, stream: str, data: bytes, *, author: str, expected: int | None = None) -> Record:
        """Append a record if the stream's head is ``expected``, or in any case if that is ``None``.

        Raises:
            Conflict: the stream's head is not ``expected`` (0: an empty stream).
            RecordTooLarge: ``data`` is longer than ``MAX_RECORD_BYTES``.
            StateUnavailable: the store cannot be reached; the record may have been written.
        """

    @abstractmethod
    async def read(
        self, stream: str, *, after: int = 0, limit: int = MAX_READ, newest_first: bool = False
    ) -> Sequence[Record]:
        """Return at most ``limit`` (1 to ``MAX_READ``) records numbered above ``after`` (from 0).

        Empty for a stream that does not exist. Raises StateUnavailable.
        """

    @abstractmethod
    async def forget(self, stream: str, up_to: int) -> None:
        """Delete the records up to that number; later records keep their numbers, and the head stays.

        Not for a stream with a :class:`StreamFollower`, which begins at 1. Raises StateUnavailable.
        """

    @abstractmethod
    async def heads(self) -> Mapping[str, int]:
        """Return the last number of each stream. Raises StateUnavailable."""

    def listen(self, stream: str, listener: Callable[[int], None]) -> None:
        """Call ``listener`` with the stream's head, on the event loop, while ``run`` runs.

        It is called soon after an append by any process, and at every poll; so it receives a new number at
        the latest at the next poll, and may receive a number twice, or an old one. 0 means that the stream
        does not exist. ``listener`` must neither block nor raise.
        """
        self._listeners.setdefault(stream, []).append(listener)

    async def announce(self, stream: str, text: str) -> None:  # noqa: B027 - a file tells nothing
        """Send a text that cannot be stored to every process that is reachable now; raises nothing."""

    def on_announcement(self, stream: str, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with announced texts while ``run`` runs; it must neither block nor raise."""
        self._announcement_listeners.setdefault(stream, []).append(listener)

    async def run(self) -> None:
        """Watch the store and call listeners until cancelled; failures of the store do not end the loop.

        Here every listener is called at each poll; stores call them earlier where they can.
        """
        while True:
            # `healthy` shows the failure; the next poll tries again.
            with contextlib.suppress(StateUnavailable):
                self._notify_all(await self.heads())
            await asyncio.sleep(self._poll_s)

    def _notify(self, stream: str, number: int) -> None:
        for listener in self._listeners.get(stream, ()):
            listener(number)

    def _announced(self, stream: str, text: str) -> None:
        for listener in self._announcement_listeners.get(stream, ()):
            listener(text)

    def _notify_all(self, heads: Mapping[str, int]) -> None:
        """Call all listeners; 0 is the head of a stream that does not exist."""
        for stream in self._listeners:
            self._notify(stream, heads.get(stream, 0))

    def _reached(self) -> None:
        self.healthy = True
        if self._away and not self.refuses_writes:
            self._log.info("state store is back", store=self._shown)
            self._away = False

    def _failed(self, operation: str, reason: str) -> None:
        if not self._away:
            self._log.warning(
                "state store is unreachable; serving goes on with the last good state, changes are refused",
                store=self._shown,
                operation=operation,
                reason=reason,
            )
        self._away, self.healthy = True, False


def check_size(stream: str, data: bytes) -> None:
    """Raise RecordTooLarge for a record that no store accepts."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordTooLarge(stream, len(data), MAX_RECORD_BYTES)
