"""How long the gateway took from its process' start until it was first ready."""

import asyncio
from collections.abc import Callable

# A start should take at most 90 s; a tenth of a second is precise enough to compare with that.
CHECK_EVERY_S = 0.1


class FirstReady:
    """Remembers it; later changes of readiness do not count.

    Args:
        ready: whether it is ready now; only reads what is known.
        process_age_s: seconds since the process' start.
    """

    def __init__(self, ready: Callable[[], bool], process_age_s: Callable[[], float]) -> None:
        self._ready = ready
        self._process_age_s = process_age_s
        self._after_s: float | None = None

    def after_s(self) -> float | None:
        """Seconds from the process' start; ``None`` while it was never ready. Checks by itself."""
        if self._after_s is None and self._ready():
            self._after_s = self._process_age_s()
        return self._after_s

    async def run(self) -> None:
        """Check until it is ready, so that the figure does not depend on who asks."""
        while True:
            if self.after_s() is not None:
                return
            await asyncio.sleep(CHECK_EVERY_S)
