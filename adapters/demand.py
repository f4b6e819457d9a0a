"""How much each adapter is asked for: requests, each of which weighs half as much after a half-life."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

# Demand of the last ten minutes predicts that of the next ten; the pattern of a day changes more slowly.
HALF_LIFE_S = 600.0
# Names that are remembered; the coldest are forgotten.
MAX_NAMES = 10_000
# Below this a name is forgotten: one request, ten half-lives ago.
_COLD = 0.001


class AdapterDemand:
    """Decaying counts by name; the clock is the caller's.

    Args:
        half_life_s: seconds after which a request weighs half as much.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self.half_life_s = half_life_s
        self._heat: dict[str, tuple[float, float]] = {}  # value, and when it was that

    def touch(self, name: str, now: float) -> None:
        """A request asked for it."""
        self._heat[name] = (self.of(name, now) + 1.0, now)
        if len(self._heat) > MAX_NAMES:
            self._forget(now)

    def of(self, name: str, now: float) -> float:
        """Its heat; 0 for one that was never asked for."""
        value, at = self._heat.get(name, (0.0, now))
        return value * math.exp2(-max(0.0, now - at) / self.half_life_s)

    def hottest(self, names: Iterable[str], now: float) -> list[str]:
        """Those of ``names`` that have any heat, hottest first; equal ones by name."""
        warm = [(self.of(name, now), name) for name in names if name in self._heat]
        return [name for heat, name in sorted(warm, key=lambda one: (-one[0], one[1])) if heat >= _COLD]

    def snapshot(self, now: float) -> Mapping[str, float]:
        """What is worth keeping."""
        return {name: heat for name in self._heat if (heat := self.of(name, now)) >= _COLD}

    def restore(self, kept: Mapping[str, float], now: float, *, age_s: float = 0.0) -> None:
        """Take what was kept ``age_s`` seconds ago; what is hotter by now stays."""
        faded = math.exp2(-max(0.0, age_s) / self.half_life_s)
        for name, heat in kept.items():
            if heat * faded >= _COLD and heat * faded > self.of(name, now) and len(self._heat) < MAX_NAMES:
                self._heat[name] = (heat * faded, now)

    def _forget(self, now: float) -> None:
        keep = self.hottest(self._heat, now)[: MAX_NAMES // 2]
        self._heat = {name: self._heat[name] for name in keep}
