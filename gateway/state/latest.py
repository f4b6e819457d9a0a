"""Keeps a process up with the last record of a stream whose every record is whole: the canary's standings.

Earlier records may be forgotten, so there is neither a history to follow nor a copy to keep: while the store
is away nothing is done with such a stream anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from gateway.state.errors import StateUnavailable
from gateway.state.follower import START_TIMEOUT_S, Standing
from gateway.state.port import Record, StateStore


class Latest:
    """Applies the last record whenever there is another one; those in between are passed over.

    Args:
        store: where the stream is; its ``run`` runs beside this one's.
        stream: its name.
        apply: takes the record; must neither block nor raise.
    """

    def __init__(self, store: StateStore, stream: str, apply: Callable[[Record], None]) -> None:
        self._store = store
        self._stream = stream
        self._apply = apply
        self._log = structlog.get_logger("state")
        self._last: Record | None = None
        self._standing = Standing.AWAY
        self._told = asyncio.Event()
        self._moved = asyncio.Condition()
        store.listen(stream, self._hear)

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._stream

    @property
    def number(self) -> int:
        """The record that is in force here; 0: none."""
        return 0 if self._last is None else self._last.number

    @property
    def standing(self) -> Standing:
        """How it stands to its stream."""
        return self._standing

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Bring the last record into force; a store that is away is caught up with by ``run``."""
        with contextlib.suppress(StateUnavailable, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._catch_up()

    async def run(self) -> None:
        """Keep up until cancelled."""
        while True:
            await self._told.wait()
            self._told.clear()
            # The store tells again when it is back.
            with contextlib.suppress(StateUnavailable):
                await self._catch_up()

    async def caught_up_to(self, number: int, timeout_s: float) -> bool:
        """Wait until record ``number``, or a later one, is in force; ``False`` when it takes too long."""
        try:
            async with asyncio.timeout(timeout_s), self._moved:
                await self._moved.wait_for(lambda: self.number >= number)
        except TimeoutError:
            return False
        return True

    def _hear(self, head: int) -> None:
        if head != self.number or self._standing is not Standing.FOLLOWING:
            self._told.set()

    async def _catch_up(self) -> None:
        """Raises StateUnavailable."""
        page = await self._store.read(self._stream, limit=1, newest_first=True)
        last, newest = self._last, page[0] if page else None
        if last is not None and (newest is None or newest.number < last.number):
            if self._standing is not Standing.LOST:
                self._log.error(
                    "the state store has lost records; the last good state stays in force",
                    stream=self._stream,
                    number=last.number,
                    found="nothing there" if newest is None else newest.number,
                )
            self._standing = Standing.LOST
            return
        self._standing = Standing.FOLLOWING
        if newest is None or newest == last:
            return
        self._apply(newest)
        self._last = newest
        async with self._moved:
            self._moved.notify_all()
