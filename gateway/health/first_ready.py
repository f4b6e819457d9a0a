"""When the gateway was first ready: as a figure, and for platforms that only poll ``/ping`` (SageMaker)."""

import asyncio
from collections.abc import Callable

# Seconds between checks. A start should take at most 90 s, so this is precise enough.
CHECK_EVERY_S = 0.1


class FirstReady:
    """Records the time of the first readiness; later changes do not count."""

    def __init__(self, ready: Callable[[], bool], process_age_s: Callable[[], float]) -> None:
        self._ready = ready
        self._process_age_s = process_age_s
        self._after_s: float | None = None

    def after_s(self) -> float | None:
        """Check readiness; return the seconds from process start to the first, ``None`` if never ready."""
        if self._after_s is None and self._ready():
            self._after_s = self._process_age_s()
        return self._after_s

    async def run(self) -> None:
        """Check until the gateway is ready, so that the figure does not depend on scrapes."""
        while True:
            if self.after_s() is not None:
                return
            await asyncio.sleep(CHECK_EVERY_S)
