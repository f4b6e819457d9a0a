"""Work that comes in bursts, one piece in each turn of the event loop, after work that is urgent."""

import asyncio
from collections import deque
from typing import Final

from msgspec import Struct

HOLD_S: Final = 0.002
"""How long a piece waits for urgent work at most: about what a chat takes from its arrival to its worker."""


class Turns:
    """Background pieces of work: each turn of the event loop has one, in order.

    So whatever else the loop has to do waits for one piece, not for all that came together. While there is
    urgent work, even that one waits for it, ``HOLD_S`` at most.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        self._urgent = 0
        self._held: asyncio.TimerHandle | None = None

    async def next(self) -> None:
        """Wait for a turn: none where no other piece had this one, and nothing is urgent."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            if not self._urgent:
                loop.call_soon(self._give, loop)
                return
            self._held = loop.call_later(HOLD_S, self._give_one, loop)
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def urgent(self) -> "Urgent":
        """``with urgent() as work``: pieces wait for the block, or until ``work.over()`` in it."""
        return Urgent(self)

    @property
    def has_urgent(self) -> bool:
        """Whether there is urgent work."""
        return self._urgent > 0

    def begun(self) -> None:
        """Urgent work has begun."""
        self._urgent += 1

    def over(self) -> None:
        """Urgent work has ended."""
        self._urgent -= 1
        held = self._held
        if not self._urgent and held is not None:
            self._held = None
            held.cancel()
            loop = asyncio.get_running_loop()
            loop.call_soon(self._give_one, loop)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._urgent and self._waiting:
            self._held = loop.call_later(HOLD_S, self._give_one, loop)
        else:
            self._give_one(loop)

    def _give_one(self, loop: asyncio.AbstractEventLoop) -> None:
        self._held = None
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                loop.call_soon(self._give, loop)
                return
        self._taken = False


class Urgent(Struct, eq=False):
    """Work for which pieces wait."""

    _turns: Turns | None

    def __enter__(self) -> "Urgent":
        if self._turns is not None:
            self._turns.begun()
        return self

    def over(self) -> None:
        """It has ended; a second call changes nothing."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.over()

    def __exit__(self, *_: object) -> None:
        if self._turns is not None:
            self.over()
