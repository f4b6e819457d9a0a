"""One log line a second of what happens a thousand times a second."""

from __future__ import annotations

from collections.abc import Callable, Hashable

INTERVAL_S = 1.0
# Kinds that are told apart; beyond it all further ones count as one.
MAX_KINDS = 200


class Sampler:
    """Lets the first of each kind through in each interval, and counts the others.

    Args:
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_kinds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def take(self, kind: Hashable) -> int | None:
        """``None`` when this one is only counted; else how many were since the last one that was not."""
        now = self._clock()
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = None
        at, more = self._kinds.get(kind, (float("-inf"), 0))
        if now - at < INTERVAL_S:
            self._kinds[kind] = (at, more + 1)
            return None
        self._kinds[kind] = (now, 0)
        return more
