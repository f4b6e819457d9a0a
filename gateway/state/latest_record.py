"""Keeps a process up with the last record of a stream whose every record is whole: the canary's standings.

Earlier records may be forgotten, so there is neither a history to follow nor a copy to keep: while the store
is away nothing is done with such a stream anyway.
"""

from __future__ import annotations

import asyncio
import contextlib

from gateway.state.errors import StateUnavailable
from gateway.state.projection import START_TIMEOUT_S, ProjectionState, StreamProjection


class LatestRecord(StreamProjection):
    """Applies the last record whenever there is another one; those in between are passed over.

    Args:
        store: where the stream is; its ``run`` runs beside this one's.
        stream: its name.
        apply: takes the record; must neither block nor raise.
    """

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Bring the last record into force; a store that is away is caught up with by ``run``."""
        with contextlib.suppress(StateUnavailable, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._catch_up()

    async def run(self) -> None:
        """Keep up until cancelled."""
        await self._keep_up()

    async def _catch_up(self) -> None:
        """Raises StateUnavailable."""
        page = await self._store.read(self._stream, limit=1, newest_first=True)
        last, newest = self._last, page[0] if page else None
        if last is not None and (newest is None or newest.number < last.number):
            if self._state is not ProjectionState.LOST:
                self._log.error(
                    "the state store has lost records; the last good state stays in force",
                    stream=self._stream,
                    number=last.number,
                    found="nothing there" if newest is None else newest.number,
                )
            self._state = ProjectionState.LOST
            return
        self._state = ProjectionState.FOLLOWING
        if newest is None or newest == last:
            return
        self._apply(newest)
        await self._in_force(newest)
