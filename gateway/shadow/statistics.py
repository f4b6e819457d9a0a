"""Confidence intervals of shares and means, in plain Python: the default installation has no numpy.

The work is done in steps that let other threads run.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from gateway.shadow.likeness import yield_thread

CONFIDENCE = 0.95
_Z = 1.959964  # the quantile of the normal distribution for a two-sided 95 % interval
# With this many resamples, the ends of an interval vary by about 3 % of its width between seeds.
RESAMPLES = 500
MIN_PAIRS = 10  # a bootstrap of fewer pairs is meaningless
# How many values are drawn and summed in one step: about a millisecond, in which no other thread runs.
_VALUES_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean or a share, and the ends of its 95 % interval; no ends for too few values."""

    mean: float
    low: float | None = None
    high: float | None = None


def wilson(good: int, count: int) -> Interval:
    """Return a share and Wilson's score interval, accurate near 0 and 1 too; ``count`` is at least 1."""
    share, square = good / count, _Z * _Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    reach = _Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return Interval(share, max(0.0, middle - reach), min(1.0, middle + reach))


def bootstrap(
    columns: Mapping[str, Sequence[float | None]], random: random.Random, *, resamples: int = RESAMPLES
) -> Mapping[str, Interval]:
    """Return the mean of each column and its percentile bootstrap interval.

    A column has one entry per pair, ``None`` for a missing value; a column without values is left out. Whole
    pairs are drawn, so all columns use the same draws and differences within a pair stay paired.
    """
    rows = max(map(len, columns.values()), default=0)
    filled = {
        name: ([0.0 if one is None else one for one in column], [float(one is not None) for one in column])
        for name, column in columns.items()
        if any(one is not None for one in column)
    }
    means = {name: sum(values) / sum(there) for name, (values, there) in filled.items()}
    enough = [name for name, (_, there) in filled.items() if sum(there) >= MIN_PAIRS]
    drawn: dict[str, list[float]] = {name: [] for name in enough}
    places = range(rows)
    at_once = max(1, _VALUES_AT_ONCE // (rows * len(enough) or 1))
    for number in range(resamples if enough else 0):
        pick = itemgetter(*random.choices(places, k=rows))
        for name in enough:
            values, there = filled[name]
            count = sum(pick(there))
            if count:
                drawn[name].append(sum(pick(values)) / count)
        if number % at_once == 0:
            yield_thread()
    tail, found = (1.0 - CONFIDENCE) / 2.0, dict[str, Interval]()
    for name, mean in means.items():
        held = sorted(drawn.get(name, ()))
        ends = (quantile(held, tail), quantile(held, 1.0 - tail)) if held else ()
        found[name] = Interval(mean, *ends)
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the linearly interpolated quantile of sorted values, of which there must be one at least."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
