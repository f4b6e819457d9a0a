"""In which order regions are asked; knows no clock and no network."""

from __future__ import annotations

from collections.abc import Sequence

# However long a region asks to be left alone, it is asked again after so many seconds.
MAX_COOL_DOWN_S = 60.0


class Regions:
    """The regions of one backend, in the operator's order, those that failed lately after the others.

    Args:
        names: the regions, the preferred one first.
        cool_down_s: how long a region that failed is passed over.
    """

    def __init__(self, names: Sequence[str], cool_down_s: float) -> None:
        self._names = tuple(names)
        self._cool_down_s = cool_down_s
        self._back_at: dict[str, float] = {}

    def order(self, now: float) -> tuple[str, ...]:
        """The regions to ask, one after the other.

        When all of them cool down only the one whose time is up first is asked: so an outage costs each
        request one call, not one a region.
        """
        warm = [name for name in self._names if self._back_at.get(name, now) <= now]
        return tuple(warm) or (min(self._names, key=lambda name: self._back_at[name]),)

    def failed(self, name: str, now: float, retry_after_s: float | None) -> None:
        """A region could not answer, and perhaps told when it may."""
        self._back_at[name] = now + min(max(self._cool_down_s, retry_after_s or 0.0), MAX_COOL_DOWN_S)

    def answered(self, name: str) -> None:
        """A region is well again."""
        self._back_at.pop(name, None)
