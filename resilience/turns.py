"""Turns of the event loop: one piece of background work in each, and one part of each request."""

import asyncio
from collections import deque
from collections.abc import Generator
from types import coroutine
from typing import Final

from msgspec import Struct

HOLD_S: Final = 0.002
"""Longest wait of a piece for urgent work: about the time of a chat from its arrival to its worker."""


class Turns:
    """Lets background pieces of work run in order, one per turn of the event loop.

    So all other work of the loop waits for one piece, not for a whole burst. While there is urgent work, even
    that piece waits, for at most ``HOLD_S``.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        self.urgent_count = 0
        # The timer that ends the wait of the next piece for urgent work.
        self.held: asyncio.TimerHandle | None = None

    async def next(self) -> None:
        """Wait for a turn; returns at once if no other piece has had this turn and nothing is urgent."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            if not self.urgent_count:
                loop.call_soon(self._give, loop)
                return
            self.held = loop.call_later(HOLD_S, self._give_one, loop)
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def urgent(self) -> "Urgent":
        """``with urgent() as work``: pieces wait until the end of the block, or until ``work.end()``."""
        return Urgent(self)

    def urgent_ended(self, held: asyncio.TimerHandle) -> None:
        """Give the turn that ``held`` delays: no urgent work is left."""
        held.cancel()
        self.held = None
        loop = asyncio.get_running_loop()
        loop.call_soon(self._give_one, loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.urgent_count and self._waiting:
            self.held = loop.call_later(HOLD_S, self._give_one, loop)
        else:
            self._give_one(loop)

    def _give_one(self, loop: asyncio.AbstractEventLoop) -> None:
        self.held = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                loop.call_soon(self._give, loop)
                return
        self._taken = False


class Urgent(Struct, eq=False):
    """Urgent work, for which background pieces wait."""

    _turns: Turns | None
    _shared: bool = True  # whether other urgent work is under way; unknown before the next turn

    @coroutine
    def next_turn(self) -> Generator[None]:
        """Continue in the next turn of the event loop, after the work due in this one, unless this is alone.

        So requests that came together go through each part of their journey together, and its code and data
        are in the processor's caches for all but the first (docs/decisions/019).
        """
        if self._shared:
            yield
            if self._turns is not None:
                self._shared = self._turns.urgent_count > 1

    def __enter__(self) -> "Urgent":
        if self._turns is not None:
            self._turns.urgent_count += 1
        return self

    def end(self) -> None:
        """End the urgent work; a second call changes nothing."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.urgent_count -= 1
            if turns.held is not None and not turns.urgent_count:
                turns.urgent_ended(turns.held)

    def __exit__(self, *_: object) -> None:
        if self._turns is not None:
            self.end()
