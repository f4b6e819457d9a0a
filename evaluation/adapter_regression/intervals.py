"""The confidence interval of a mean: a bootstrap over prompts, with a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, confidence: float, seed: int) -> ConfidenceInterval:
    """Return the percentile bootstrap of a mean.

    Prompts are resampled, so that the interval shows which means other prompts of the same kind might have
    given. Raises ValueError without values.
    """
    if not values:
        raise ValueError("there is nothing to take a mean of")
    given = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(given), size=(RESAMPLES, len(given)))
    means = given[draws].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, (tail, 1.0 - tail))
    return ConfidenceInterval(float(given.mean()), float(low), float(high))
