"""The time of one request: how long each stage took, and the longest that all of them may take."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from gateway.errors import DeadlineExceeded


class StageTimer:
    """How long each stage of one request took, in milliseconds, in order.

    Attributes:
        stage_ms: by stage.
    """

    __slots__ = ("_arrived_at", "_clock", "_last", "_timeout", "stage_ms")

    def __init__(self, clock: Callable[[], float], arrived_at: float) -> None:
        self._clock = clock
        self._arrived_at = self._last = arrived_at
        self._timeout: asyncio.Timeout | None = None
        self.stage_ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """The stage has ended."""
        now = self._clock()
        self.stage_ms[stage] = (now - self._last) * 1000
        self._last = now

    def total_ms(self) -> float:
        """Milliseconds since arrival."""
        return (self._clock() - self._arrived_at) * 1000

    def at_ms(self, at: float | None) -> float | None:
        """A moment of the clock in milliseconds after arrival."""
        return None if at is None else (at - self._arrived_at) * 1000

    @property
    def timed_out(self) -> bool:
        """Whether the request was, or is being, cancelled because it took too long."""
        return self._timeout is not None and self._timeout.expired()

    @contextlib.asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncIterator[None]:
        """Cancel the block after ``timeout_s``.

        Raises:
            DeadlineExceeded: in place of that cancellation.
        """
        try:
            async with asyncio.timeout(timeout_s) as self._timeout:
                yield
        except TimeoutError:
            if not self.timed_out:
                raise
            raise DeadlineExceeded(f"the request took longer than {timeout_s:g} s") from None
