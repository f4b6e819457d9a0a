"""At most one log line a second for each kind of event."""

from collections.abc import Callable, Hashable

INTERVAL_S = 1.0
# Kinds with an entry of their own; all further ones share one.
MAX_KINDS = 200


class Sampler:
    """Lets the first of each kind through in each interval, and counts the others."""

    __slots__ = ("_clock", "_kinds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def take(self, kind: Hashable) -> int | None:
        """``None`` when the event is only counted; else the number of events counted since the last line."""
        now = self._clock()
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = None
        at, more = self._kinds.get(kind, (float("-inf"), 0))
        if now - at < INTERVAL_S:
            self._kinds[kind] = (at, more + 1)
            return None
        self._kinds[kind] = (now, 0)
        return more
