"""Many pairs as one report: JSON values, of which table and page are made.

What is compared, for all pairs and by prompt version, adapter and intent: shares of answers that pass each
check, with Wilson's intervals; means of numbers, with a bootstrap of their paired differences; how alike the
answers are. Differences are the shadow's less the primary's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from accounting.shadow_values import ShadowPair, ShadowSide
from gateway.shadow.statistics import CONFIDENCE, Interval, bootstrap, quantile, wilson

# By which pairs are grouped, and most groups of each: those with the most pairs.
BY = ("prompt_version", "adapter_id", "intent")
MAX_GROUPS = 20
# The plots' points.
QUANTILES = (*(round(0.05 * step, 2) for step in range(20)), 0.99)
SEED = 0

NUMBERS: Mapping[str, Callable[[ShadowSide], float | None]] = MappingProxyType(
    {
        "ttft_ms": lambda side: side.ttft_ms,
        "total_ms": lambda side: side.total_ms,
        "output_tokens": lambda side: side.output_tokens,
        "chars": lambda side: side.chars,
        "cost_nanousd": lambda side: side.cost_nanousd,
    }
)
"""What is measured of one answer; of pairs whose shadow failed nothing is compared."""


def make_report(pairs: Sequence[ShadowPair]) -> dict[str, Any]:
    """The report; seconds for ten thousand pairs, so not on the event loop."""
    whole = [pair for pair in pairs if pair.shadow.failure is None]
    at = [pair.at for pair in pairs]
    groups = [_group(None, None, pairs)] if pairs else []
    for by in BY:
        counts = Counter(getattr(pair, by) for pair in pairs)
        if len(counts) < 2:
            continue  # that group is all of them
        for value, _ in counts.most_common(MAX_GROUPS):
            groups.append(_group(by, value, [pair for pair in pairs if getattr(pair, by) == value]))
    return {
        "pairs": len(pairs),
        "compared": len(whole),
        "since": min(at, default=None),
        "until": max(at, default=None),
        "confidence": CONFIDENCE,
        "primary": sorted({pair.primary.version for pair in pairs}),
        "shadow": sorted({pair.shadow.version for pair in pairs}),
        "failures": dict(Counter(pair.shadow.failure for pair in pairs if pair.shadow.failure is not None)),
        "finish_reasons": [
            {"primary": ours, "shadow": theirs, "pairs": count}
            for (ours, theirs), count in Counter(
                (pair.primary.finish_reason, pair.shadow.finish_reason) for pair in whole
            ).most_common()
        ],
        "groups": groups,
        "quantiles": {
            "shares": list(QUANTILES),
            **{name: _quantiles(whole, NUMBERS[name]) for name in ("ttft_ms", "total_ms", "output_tokens")},
        },
    }


def _group(by: str | None, value: str | None, pairs: Sequence[ShadowPair]) -> dict[str, Any]:
    whole = [pair for pair in pairs if pair.shadow.failure is None]
    names = list(dict.fromkeys(name for pair in whole for name in pair.primary.checks))
    columns: dict[str, list[float | None]] = {
        "likeness": [pair.likeness for pair in whole],
        "meaning": [pair.meaning for pair in whole],
        "length_ratio": [
            pair.shadow.chars / pair.primary.chars if pair.primary.chars else None for pair in whole
        ],
    }
    for name, of in NUMBERS.items():
        columns[f"number:{name}"] = [_less(of(pair.shadow), of(pair.primary)) for pair in whole]
    for name in names:
        columns[f"check:{name}"] = [
            _less(_said(pair.shadow, name), _said(pair.primary, name)) for pair in whole
        ]
    found = bootstrap(columns, random.Random(SEED))
    judged = Counter(pair.judged for pair in pairs if pair.judged is not None)
    return {
        "by": by,
        "value": value,
        "pairs": len(pairs),
        "answered": _interval(wilson(len(whole), len(pairs))),
        "checks": [one for name in names if (one := _check(name, whole, found))],
        "numbers": [one for name in NUMBERS if (one := _number(name, whole, found))],
        "same_finish_reason": _share(
            [pair.primary.finish_reason == pair.shadow.finish_reason for pair in whole]
        ),
        "same_language": _share(
            [
                pair.primary.language == pair.shadow.language
                for pair in whole
                if pair.primary.language is not None and pair.shadow.language is not None
            ]
        ),
        **{
            name: _interval(found[name]) if name in found else None
            for name in ("length_ratio", "likeness", "meaning")
        },
        "judged": dict(judged) or None,
    }


def _check(name: str, pairs: Sequence[ShadowPair], found: Mapping[str, Interval]) -> dict[str, Any] | None:
    """Of the pairs of which the check has something to say on both sides."""
    both = [
        (ours, theirs)
        for pair in pairs
        if (ours := pair.primary.checks.get(name)) is not None
        and (theirs := pair.shadow.checks.get(name)) is not None
    ]
    if not both:
        return None
    return {
        "check": name,
        "pairs": len(both),
        "primary": _interval(wilson(sum(ours for ours, _ in both), len(both))),
        "shadow": _interval(wilson(sum(theirs for _, theirs in both), len(both))),
        "difference": _interval(found[f"check:{name}"]),
    }


def _number(name: str, pairs: Sequence[ShadowPair], found: Mapping[str, Interval]) -> dict[str, Any] | None:
    of = NUMBERS[name]
    both = [
        (ours, theirs)
        for pair in pairs
        if (ours := of(pair.primary)) is not None and (theirs := of(pair.shadow)) is not None
    ]
    if not both:
        return None
    sides = {"primary": [ours for ours, _ in both], "shadow": [theirs for _, theirs in both]}
    told: dict[str, Any] = {"measure": name, "pairs": len(both)}
    for side, values in sides.items():
        ordered = sorted(values)
        told[side] = {
            "mean": round(sum(values) / len(values), 3),
            "p50": round(quantile(ordered, 0.5), 3),
            "p99": round(quantile(ordered, 0.99), 3),
        }
    told["difference"] = _interval(found[f"number:{name}"])
    return told


def _quantiles(
    pairs: Sequence[ShadowPair], of: Callable[[ShadowSide], float | None]
) -> dict[str, Any] | None:
    sides = {
        "primary": sorted(value for pair in pairs if (value := of(pair.primary)) is not None),
        "shadow": sorted(value for pair in pairs if (value := of(pair.shadow)) is not None),
    }
    if not all(sides.values()):
        return None
    return {
        side: [round(quantile(values, share), 3) for share in QUANTILES] for side, values in sides.items()
    }


def _said(side: ShadowSide, check: str) -> float | None:
    said = side.checks.get(check)
    return None if said is None else float(said)


def _less(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or ours is None else theirs - ours


def _share(said: Sequence[bool]) -> dict[str, Any] | None:
    return {**_interval(wilson(sum(said), len(said))), "pairs": len(said)} if said else None


def _interval(one: Interval) -> dict[str, float | None]:
    return {
        "mean": round(one.mean, 4),
        "low": None if one.low is None else round(one.low, 4),
        "high": None if one.high is None else round(one.high, 4),
    }
