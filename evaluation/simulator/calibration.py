"""Fits a profile to measured steps: least squares over the work and the time of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step, or the mean of many.

    Prompt tokens, decoding sequences, tokens of their context, seconds.
    """

    prefill: float
    sequences: float
    context: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of ``Profile.step_s``, and the median error of a step as a share of its time."""

    base_s: float
    prefill_s: float
    sequence_s: float
    context_s: float
    median_error: float


def fit(steps: Sequence[MeasuredStep]) -> Fit:
    """Return the non-negative coefficients with the smallest relative errors.

    A coefficient that would be negative is left out, and the others are fitted again. The slowest hundredth
    of the steps is not used: other work ran during them.

    Raises:
        ValueError: fewer steps than a fit needs.
    """
    if len(steps) < 20:
        raise ValueError(f"{len(steps)} steps are too few to fit; at least 20 are needed")
    parts = np.array([(1, one.prefill, one.sequences, one.context) for one in steps], dtype=float)
    took = np.array([one.took_s for one in steps])
    used, coefficients = [0, 1, 2, 3], np.zeros(4)
    keep = np.ones(len(steps), dtype=bool)
    for _ in range(8):
        rows = parts[keep][:, used] / took[keep, None]
        found = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
        if (found < 0).any() and len(used) > 1:
            used = [index for index, value in zip(used, found, strict=True) if value >= 0]
            continue
        coefficients = np.zeros(4)
        coefficients[used] = found
        slower = took / np.maximum(parts @ coefficients, 1e-9)
        settled = keep
        keep = slower <= np.quantile(slower, 0.99)
        if (keep == settled).all():
            break
    errors = np.abs(parts @ coefficients - took) / took
    base_s, prefill_s, sequence_s, context_s = (float(value) for value in coefficients)
    return Fit(base_s, prefill_s, sequence_s, context_s, float(np.median(errors)))
