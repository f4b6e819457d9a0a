"""Work that comes in bursts, one piece in each turn of the event loop."""

import asyncio
from collections import deque


class Turns:
    """Background pieces of work: each turn of the event loop has one, in order.

    So whatever else the loop has to do waits for one piece, not for all that came together.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        """Wait for a turn: none where no other piece had this one."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._give, loop)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                loop.call_soon(self._give, loop)
                return
        self._taken = False
