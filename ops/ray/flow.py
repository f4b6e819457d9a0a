"""Passes one answer from an engine to the replica's stream; all deltas that are ready go into one piece."""

import asyncio

from gateway.backends.port import Completion
from gateway.contracts.events import Delta
from ops.ray.wire import Failed, ReplicaPiece

# Least deltas per piece, after the first piece, of an answer that is not streamed: between two processes a
# piece costs as much as the other work for some ten tokens. A lost replica costs at most this many tokens.
UNWATCHED_DELTAS = 16


class Flow:
    """One answer between a backend that pushes deltas and a stream that pulls pieces.

    Its length is bounded by the answer's ``max_tokens``; ``watched``: whether a client waits for each piece.
    """

    __slots__ = ("_deltas", "_end", "_least", "_waiter", "_watched", "ended")

    def __init__(self, *, watched: bool) -> None:
        self._deltas: list[Delta] = []
        self._end: Completion | Failed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._watched = watched
        self._least = 1
        self.ended = False

    async def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if len(self._deltas) >= self._least:
            self._wake()

    def end(self, end: Completion | Failed) -> None:
        """Set the end of the answer; no delta may be pushed afterwards."""
        self._end = end
        self._wake()

    async def take(self) -> ReplicaPiece:
        """Wait for and return all that is ready; sets ``ended`` with the last piece. For a single task."""
        if self._end is None and len(self._deltas) < self._least:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = tuple(self._deltas), []
        if deltas and not self._watched:
            self._least = UNWATCHED_DELTAS
        self.ended = self._end is not None
        if isinstance(self._end, Failed):
            return ReplicaPiece(deltas=deltas, failed=self._end)
        return ReplicaPiece(deltas=deltas, completion=self._end)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
