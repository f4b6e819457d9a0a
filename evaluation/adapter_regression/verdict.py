"""Turns numbers per prompt into a verdict: one finding per metric, and whether the candidate passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evaluation.adapter_regression.intervals import ConfidenceInterval, mean_interval
from evaluation.adapter_regression.thresholds import METRICS, RATIOS, Threshold, Thresholds

# Most prompts that a finding names: those that became worse by the most.
MAX_NAMED = 5

Scores = Mapping[str, Mapping[str, float]]  # by metric, then by prompt


class MetricVerdict(StrEnum):
    """What the confidence interval shows. Only ``WORSE`` and ``UNSURE`` keep a candidate from passing."""

    PASSED = "passed"
    WORSE = "worse"
    UNSURE = "unsure"
    SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class MetricFinding:
    """One metric of both adapters over the same prompts.

    Args:
        metric: its name.
        prompts: number of prompts. active, candidate: means; for times geometric means, in seconds. change:
        how much worse the candidate is: a difference, above 0 when it is worse; for times the ratio of the
        candidate's to the other's. allowed: the most that ``change`` may be; ``None``: not judged. at_least:
        lowest allowed mean of the candidate, if any. standing: the verdict on this metric. named: the prompts
        that became worse by the most.
    """

    metric: str
    prompts: int
    active: float
    candidate: float
    change: ConfidenceInterval
    allowed: float | None
    at_least: float | None
    standing: MetricVerdict
    named: tuple[str, ...]


def judge(
    active: Scores, candidate: Scores, thresholds: Thresholds, *, against_base: bool, seed: int
) -> tuple[MetricFinding, ...]:
    """Return a finding for every metric that both adapters have, over the prompts with both scores."""
    findings = []
    for metric in METRICS:
        pairs = {
            case: (value, candidate[metric][case])
            for case, value in active.get(metric, {}).items()
            if case in candidate.get(metric, {})
        }
        if pairs:
            threshold = thresholds.metrics.get(metric, Threshold())
            allowed = threshold.allowed(against_base=against_base)
            findings.append(_finding(metric, pairs, threshold, allowed, thresholds.confidence, seed))
    return tuple(findings)


def passes(findings: tuple[MetricFinding, ...]) -> bool:
    """Return whether no metric is worse and none is unsure; without findings a candidate does not pass."""
    return bool(findings) and all(
        one.standing in (MetricVerdict.PASSED, MetricVerdict.SHOWN) for one in findings
    )


def _finding(
    metric: str,
    pairs: Mapping[str, tuple[float, float]],
    threshold: Threshold,
    allowed: float | None,
    confidence: float,
    seed: int,
) -> MetricFinding:
    ratio = metric in RATIOS
    sign = -1.0 if METRICS[metric] else 1.0
    changes = {
        case: math.log(new / old) if ratio else sign * (new - old) for case, (old, new) in pairs.items()
    }
    change = mean_interval(list(changes.values()), confidence=confidence, seed=seed)
    if ratio:
        change = ConfidenceInterval(math.exp(change.mean), math.exp(change.low), math.exp(change.high))
    old, new = (_mean([pair[side] for pair in pairs.values()], geometric=ratio) for side in (0, 1))
    standing = _standing(change, allowed)
    if threshold.at_least is not None and new < threshold.at_least:
        standing = MetricVerdict.WORSE
    worst = sorted((case for case, value in changes.items() if value > 0), key=lambda case: -changes[case])
    return MetricFinding(
        metric=metric,
        prompts=len(pairs),
        active=old,
        candidate=new,
        change=change,
        allowed=allowed,
        at_least=threshold.at_least,
        standing=standing,
        named=() if ratio else tuple(worst[:MAX_NAMED]),
    )


def _standing(change: ConfidenceInterval, allowed: float | None) -> MetricVerdict:
    if allowed is None:
        return MetricVerdict.SHOWN
    if change.high <= allowed:
        return MetricVerdict.PASSED
    return MetricVerdict.WORSE if change.low > allowed else MetricVerdict.UNSURE


def _mean(values: list[float], *, geometric: bool) -> float:
    if geometric:
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)
