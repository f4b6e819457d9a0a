"""Percentiles and means of small samples, by hand: the load generator needs no numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``ordered`` lies, interpolated between neighbours.

    ``ordered`` is sorted and not empty. The same definition as numpy's default.
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Clamped: the product may round past a neighbour by the last bit.
    return min(max(low + (high - low) * (place - below), low), high)


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure was distributed; all ``None`` for no values."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(values: Iterable[float]) -> Spread:
    """Count, mean, percentiles and maximum of ``values``."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0)
    return Spread(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )
