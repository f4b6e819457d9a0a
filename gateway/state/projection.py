"""The base class of followers of a stream, and the follower of a stream's last record."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import structlog

from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import Record, StateStore

START_TIMEOUT_S = 5.0


class ProjectionState(StrEnum):
    """Whether a follower is up to date with its stream; stable codes."""

    FOLLOWING = "following"
    AWAY = "away"
    """The store was unreachable at the start; the local copy is in force."""
    LOST = "lost"
    """The store lacks records that were applied here, or has other records in their place."""
    REFUSED = "refused"
    """A record cannot be applied, for example one of a newer version; the state before it is in force."""


class StreamProjection(ABC):
    """Follows one stream of ``store``; subclasses define how it catches up."""

    def __init__(self, store: StateStore, stream: str, apply: Callable[[Record], None]) -> None:
        self._store = store
        self.stream = stream
        self._apply = apply
        self._log = structlog.get_logger("state")
        self._last: Record | None = None
        self.state = ProjectionState.AWAY
        self._notified = asyncio.Event()
        self._moved = asyncio.Condition()
        store.listen(stream, self._on_head)

    @property
    def number(self) -> int:
        """The number of the last record applied here; 0: none."""
        return 0 if self._last is None else self._last.number

    async def caught_up_to(self, number: int, timeout_s: float) -> bool:
        """Wait until record ``number`` is applied; ``False`` after the timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._moved:
                await self._moved.wait_for(lambda: self.number >= number)
        except TimeoutError:
            return False
        return True

    async def append(self, data: bytes, *, author: str, expected: int | None = None) -> Record:
        """Append a record; raises what :meth:`StateStore.append` raises.

        Raises StateUnavailable too if the store has lost records that are applied here: no process would
        apply the new record, whose number they have seen.
        """
        self.check_complete()
        applied = self.number
        try:
            record = await self._store.append(self.stream, data, author=author, expected=expected)
        except Conflict as error:
            if error.found < applied:
                raise _incomplete(applied, unwritten=True) from error
            raise
        if record.number <= applied:
            raise _incomplete(applied)
        return record

    def check_complete(self) -> None:
        """Raise StateUnavailable if the store has lost records that are applied here."""
        if self.state is ProjectionState.LOST:
            raise _incomplete(self.number, unwritten=True)

    def _on_head(self, head: int) -> None:
        if head != self.number or self.state is not ProjectionState.FOLLOWING or self._must_verify():
            self._notified.set()

    def _must_verify(self) -> bool:
        """Whether the stream must be read although it has not grown."""
        return False

    @abstractmethod
    async def _catch_up(self) -> None:
        """Apply new records. Raises StateUnavailable."""

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        while True:
            await self._notified.wait()
            self._notified.clear()
            # The store notifies again when it is reachable.
            with contextlib.suppress(StateUnavailable):
                await self._catch_up()

    def _lost(self, found: str | int) -> None:
        """The store lacks the last applied record, and has ``found`` in its place."""
        if self.state is not ProjectionState.LOST:
            self._log.error(
                "the state store has lost records; the last good state stays in force, an operator decides",
                stream=self.stream,
                number=self.number,
                found=found,
            )
        self.state = ProjectionState.LOST

    async def _in_force(self, record: Record) -> None:
        self._last = record
        async with self._moved:
            self._moved.notify_all()


def _incomplete(applied: int, *, unwritten: bool = False) -> StateUnavailable:
    reason = f"it has lost records; number {applied} is in force here"
    return StateUnavailable("append", reason, writes_refused=unwritten)


class LatestRecord(StreamProjection):
    """Applies the newest record of a stream whose records are complete states; it skips older ones.

    Earlier records may be deleted, so there is no history to follow. There is no local copy either: nothing
    uses such a stream while the store is unreachable.

    Args:
        store: holds the stream; its ``run`` must be running.
        apply: receives the record; must neither block nor raise.
    """

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Apply the last record; if the store cannot be reached, ``run`` applies it later."""
        with contextlib.suppress(StateUnavailable, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._catch_up()

    async def _catch_up(self) -> None:
        page = await self._store.read(self.stream, limit=1, newest_first=True)
        last, newest = self._last, page[0] if page else None
        if last is not None and (newest is None or newest.number < last.number):
            self._lost("nothing there" if newest is None else newest.number)
            return
        self.state = ProjectionState.FOLLOWING
        if newest is None or newest == last:
            return
        self._apply(newest)
        await self._in_force(newest)


IN_FORCE_S: Final = 5.0  # longest wait for a change to be applied in the process that made it, in seconds


class FollowedStream:
    """A projection that can wait until a record is applied; its follower is attached after construction."""

    followed: StreamProjection

    def follow(self, follower: StreamProjection) -> None:
        self.followed = follower

    async def caught_up_to(self, number: int, timeout_s: float = IN_FORCE_S) -> bool:
        """Wait until record ``number`` is applied here; ``False`` after the timeout."""
        return await self.followed.caught_up_to(number, timeout_s)
