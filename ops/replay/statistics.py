"""Percentiles and means of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lies, interpolated linearly."""
    return float(np.quantile(values, share))


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a figure; all ``None`` for no values."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(values: Sequence[float]) -> Spread:
    """Count, mean, percentiles and maximum of ``values``."""
    if not values:
        return Spread(0)
    return Spread(
        len(values), float(np.mean(values)), *map(float, np.quantile(values, (0.5, 0.9, 0.99, 1.0)))
    )
