"""Byte ranges: which of a file are here, which are missing. Half-open: ``(start, end)``."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def missing(size: int, here: Iterable[Interval]) -> list[Interval]:
    """What lacks of ``0..size`` when ``here`` is there, in order; ``here`` may overlap and overreach."""
    gaps: list[Interval] = []
    reached = 0
    for start, end in sorted(here):
        if start > reached:
            gaps.append((reached, min(start, size)))
        reached = max(reached, end)
        if reached >= size:
            return gaps
    gaps.append((reached, size))
    return [gap for gap in gaps if gap[0] < gap[1]]


def length(intervals: Iterable[Interval]) -> int:
    """Bytes in intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def segments(intervals: Iterable[Interval], most: int) -> list[Interval]:
    """The same bytes in intervals of at most ``most``."""
    return [(at, min(at + most, end)) for start, end in intervals for at in range(start, end, most)]
