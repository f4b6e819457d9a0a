"""Follows the last record of a stream whose records are complete states: those of the canary.

Earlier records may be deleted, so there is no history to follow. There is no local copy either: nothing uses
such a stream while the store is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib

from gateway.state.errors import StateUnavailable
from gateway.state.projection import START_TIMEOUT_S, ProjectionState, StreamProjection


class LatestRecord(StreamProjection):
    """Applies the newest record; those between two reads are skipped.

    Args:
        store: holds the stream; its ``run`` must be running.
        apply: receives the record; must neither block nor raise.
    """

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Apply the last record; when the store cannot be reached, ``run`` does it later."""
        with contextlib.suppress(StateUnavailable, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._catch_up()

    async def run(self) -> None:
        """Follow until cancelled."""
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
