"""Which workers of a model are in service: whether there is one, and since when there is none."""

import asyncio
import contextlib
from collections.abc import Callable

# Time between two probes of a worker while none is in service, seconds. Longer in a large pool: at most
# MAX_PROBES probes a second in all.
OUTAGE_PROBE_S = 0.25
MAX_PROBES = 200.0


class WorkersInService:
    """Records which workers are in service, and waits for one. Lives on one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._probe_now: dict[str, Callable[[], None]] = {}  # by worker URL, so bounded by their number
        self.serving: set[str] = set()  # the workers' URLs
        self._outage_began_at: float | None = None
        self._any = asyncio.Event()

    @property
    def outage_probe_s(self) -> float:
        """Time between two probes of one worker while none is in service, seconds."""
        return max(OUTAGE_PROBE_S, len(self._probe_now) / MAX_PROBES)

    @property
    def outage_s(self) -> float | None:
        """Seconds since the last one left; ``None`` while one is in service and before the first one was."""
        return None if self._outage_began_at is None else max(0.0, self._clock() - self._outage_began_at)

    def join_pool(self, url: str, probe_now: Callable[[], None]) -> None:
        """Add a worker to the pool, in service or not; ``probe_now`` triggers a probe of it."""
        self._probe_now[url] = probe_now

    def leave_pool(self, url: str) -> None:
        """Remove a worker from the pool: it serves other models now."""
        self._probe_now.pop(url, None)
        if url in self.serving:
            self.remove(url)

    def add(self, url: str) -> None:
        self.serving.add(url)
        self._outage_began_at = None
        self._any.set()

    def remove(self, url: str) -> None:
        """Record that the worker left service; if it was the last one, all workers are probed."""
        self.serving.discard(url)
        if self.serving or self._outage_began_at is not None:
            return
        self._outage_began_at = self._clock()
        self._any.clear()
        for probe_now in self._probe_now.values():
            probe_now()

    def close(self) -> None:
        self._any.set()

    async def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._any.wait()
