"""The bulkhead: at most so many calls at once, and a few more that wait for one to end."""

from __future__ import annotations

import asyncio

from resilience.failures import BackendFailure, FailureKind

# Calls that may wait for a lane. Admission hands on as many as there are lanes and a few besides.
MAX_WAITING = 16
# What those that find no place are told to wait, seconds: calls end one by one.
RETRY_AFTER_S = 1.0


class Lanes:
    """Counts calls; a lane is given back when its thread has ended, not when its caller has gone.

    Args:
        count: calls at once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting = 0
        self._free = asyncio.Semaphore(count)
        self._busy = 0

    @property
    def busy(self) -> int:
        """Lanes in use."""
        return self._busy

    async def enter(self) -> None:
        """Take a lane, in the order of arrival.

        Raises:
            BackendFailure: too many wait already.
        """
        if self._free.locked() and self.waiting >= MAX_WAITING:
            raise BackendFailure(
                FailureKind.THROTTLED,
                f"max_concurrency ({self.count}) calls to Bedrock are under way, and {self.waiting} wait",
                retry_after_s=RETRY_AFTER_S,
            )
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self._busy += 1

    def leave(self) -> None:
        """Give a lane back."""
        self._busy -= 1
        self._free.release()
