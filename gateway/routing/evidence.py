"""The strength of the evidence against a canary: an e-value, which is valid at any time.

A window is a 2x2 table: good and bad requests of canary and baseline. Given the requests of each side and the
total of bad ones, the canary's number of bad requests follows Fisher's noncentral hypergeometric
distribution. It depends only on the odds ratio, not on how bad the hour is for both sides. The ratio of its
probabilities at a worse odds ratio and at the tolerated one has mean 1 if the canary is exactly as bad as
tolerated, and less if it is better. So the product over windows is a supermartingale. By Ville's inequality
it ever reaches 1/alpha with a probability of at most alpha, however often it is evaluated and whenever
evaluation stops: no approximation, no least number of samples (e-variables for 2x2 tables: Turner, Ly,
Grünwald, arXiv:2106.02693; the mixture as in the mixture SPRT of Johari, Pekelis, Walsh, arXiv:1512.04922;
its use for canaries: Lindon et al., arXiv:2205.14762).

The product is mixed over how much worse the canary is, and over the window in which it became worse: a long
good time does not hide a canary that becomes bad later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALTERNATIVES = (1.5, 2.0, 4.0, 10.0, 50.0)
"""The odds ratios tested for, relative to the tolerated one, with equal weights: nuisance to outage."""


@dataclass(frozen=True, slots=True)
class EvidenceWindow:
    """One check's request counts in one window; the requests of a side include its bad ones."""

    canary_bad: int = 0
    canary: int = 0
    baseline_bad: int = 0
    baseline: int = 0

    def __add__(self, other: EvidenceWindow) -> EvidenceWindow:
        return EvidenceWindow(
            self.canary_bad + other.canary_bad,
            self.canary + other.canary,
            self.baseline_bad + other.baseline_bad,
            self.baseline + other.baseline,
        )

    @property
    def has_both(self) -> bool:
        """Whether both sides have requests, so that they can be compared."""
        return self.canary > 0 and self.baseline > 0

    @property
    def is_evidence(self) -> bool:
        """Whether the window is evidence: both sides have requests, and some are bad but not all."""
        bad, all_ = self.canary_bad + self.baseline_bad, self.canary + self.baseline
        return self.has_both and 0 < bad < all_


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a step's windows for one check.

    Args:
        windows: the number of windows that were evidence.
        logs: for each alternative, the logarithm of the weighted sum of its products from each window on.
    """

    windows: int = 0
    logs: tuple[float, ...] = ()

    def seen(self, window: EvidenceWindow, tolerance: float) -> Evidence:
        """Add a window; ``tolerance`` is the tolerated odds ratio."""
        if not window.is_evidence:
            return self
        number = self.windows + 1
        # The weight of "bad from this window on"; the weights of all windows add up to 1.
        share = -math.log(number) - math.log(number + 1)
        before = self.logs or (-math.inf,) * len(ALTERNATIVES)
        ratios = log_ratios(window, tolerance, ALTERNATIVES)
        return Evidence(
            number, tuple(_log_sum((log, share)) + ratio for log, ratio in zip(before, ratios, strict=True))
        )

    @property
    def log_e(self) -> float:
        """The natural logarithm of the e-value; 0 without a window."""
        if not self.logs:
            return 0.0
        to_come = -math.log(self.windows + 1)
        return _log_sum((*(log - math.log(len(self.logs)) for log in self.logs), to_come))


def log_ratios(window: EvidenceWindow, tolerance: float, worse: Sequence[float]) -> list[float]:
    """Return, per odds ratio in ``worse``, the log likelihood ratio of the window against ``tolerance``."""
    bad = window.canary_bad + window.baseline_bad
    least, most = max(0, bad - window.baseline), min(bad, window.canary)
    at_tolerance = [
        _log_choose(window.canary, k) + _log_choose(window.baseline, bad - k) + k * math.log(tolerance)
        for k in range(least, most + 1)
    ]
    base = _log_sum(at_tolerance)
    found = []
    for ratio in worse:
        log = math.log(ratio)
        total = _log_sum([value + (least + i) * log for i, value in enumerate(at_tolerance)])
        found.append(window.canary_bad * log + base - total)
    return found


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_sum(logs: Iterable[float]) -> float:
    found = list(logs)
    most = max(found)
    return most + math.log(math.fsum(math.exp(log - most) for log in found))
