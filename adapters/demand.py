"""The demand for each adapter: its requests, each weighing half as much after a half-life."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

# Demand of the last ten minutes predicts that of the next ten; the pattern of a day changes more slowly.
HALF_LIFE_S = 600.0
# Names with a count; those with the least demand are evicted.
MAX_NAMES = 10_000
# Below this a count is dropped: one request, ten half-lives ago.
_LEAST = 0.001


class AdapterDemand:
    """Decaying counts by name; the clock is the caller's."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self.half_life_s = half_life_s
        self._counts: dict[str, tuple[float, float]] = {}  # value, and the time of that value

    def touch(self, name: str, now: float) -> None:
        """Count a request."""
        self._counts[name] = (self.of(name, now) + 1.0, now)
        if len(self._counts) > MAX_NAMES:
            self._forget(now)

    def of(self, name: str, now: float) -> float:
        """Its demand; 0 without a request so far."""
        value, at = self._counts.get(name, (0.0, now))
        return value * math.exp2(-max(0.0, now - at) / self.half_life_s)

    def most_demanded(self, names: Iterable[str], now: float) -> list[str]:
        """Those of ``names`` with a demand, the highest first; equal ones by name."""
        demanded = [(self.of(name, now), name) for name in names if name in self._counts]
        return [
            name for value, name in sorted(demanded, key=lambda one: (-one[0], one[1])) if value >= _LEAST
        ]

    def snapshot(self, now: float) -> Mapping[str, float]:
        """The counts worth storing."""
        return {name: value for name in self._counts if (value := self.of(name, now)) >= _LEAST}

    def restore(self, stored: Mapping[str, float], now: float, *, age_s: float = 0.0) -> None:
        """Restore counts stored ``age_s`` seconds ago; a higher current count stays."""
        decay = math.exp2(-max(0.0, age_s) / self.half_life_s)
        for name, value in stored.items():
            if (
                value * decay >= _LEAST
                and value * decay > self.of(name, now)
                and len(self._counts) < MAX_NAMES
            ):
                self._counts[name] = (value * decay, now)

    def _forget(self, now: float) -> None:
        keep = self.most_demanded(self._counts, now)[: MAX_NAMES // 2]
        self._counts = {name: self._counts[name] for name in keep}
