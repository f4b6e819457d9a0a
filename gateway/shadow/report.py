"""A report over many pairs, as JSON values.

It compares, over all pairs and by shadow, primary, prompt version, adapter and intent: the share of answers
that pass each check, with Wilson's interval; means of numbers, with a bootstrap of their paired differences;
the similarity of the answers. A difference is the shadow's value minus the primary's.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from accounting.shadow_values import ShadowPair, ShadowSide
from gateway.shadow.statistics import CONFIDENCE, Interval, bootstrap, quantile, wilson

# The most groups of each kind: those with the most pairs.
MAX_GROUPS = 20
# The points of the plots.
QUANTILES = (*(round(0.05 * step, 2) for step in range(20)), 0.99)
SEED = 0

Measure = Callable[[ShadowSide], float | None]

NUMBERS: Mapping[str, Measure] = {
    "ttft_ms": lambda side: side.ttft_ms,
    "total_ms": lambda side: side.total_ms,
    "output_tokens": lambda side: side.output_tokens,
    "chars": lambda side: side.chars,
    "tool_calls": lambda side: side.tool_calls,
    "reasoning_chars": lambda side: side.reasoning_chars,
    "cost_nanousd": lambda side: side.cost_nanousd,
}
"""The measures of one answer. A pair whose shadow failed is not compared."""


def _answering(pair: ShadowPair, side: ShadowSide) -> str:
    """Return the backend and the base model of a side."""
    return f"{side.backend} ({side.version.removesuffix(f'+{pair.adapter_id}')})"


BY: Mapping[str, Callable[[ShadowPair], str | None]] = {
    "shadow": lambda pair: _answering(pair, pair.shadow),
    "primary": lambda pair: _answering(pair, pair.primary),
    "prompt_version": lambda pair: pair.prompt_version,
    "adapter_id": lambda pair: pair.adapter_id,
    "intent": lambda pair: pair.intent,
}
"""What pairs are grouped by. A route's shadow may have been replaced, and routes have different ones."""


def make_report(pairs: Sequence[ShadowPair]) -> dict[str, Any]:
    """Compute the report. It takes seconds for ten thousand pairs, so it must not run on the event loop."""
    compared = [pair for pair in pairs if pair.shadow.failure is None]
    at = [pair.at for pair in pairs]
    groups = [_group(None, None, pairs)] if pairs else []
    for by, of in BY.items():
        counts = Counter(map(of, pairs))
        if len(counts) < 2:
            continue  # the only group would contain all pairs
        for value, _ in counts.most_common(MAX_GROUPS):
            groups.append(_group(by, value, [pair for pair in pairs if of(pair) == value]))
    return {
        "pairs": len(pairs),
        "compared": len(compared),
        "since": min(at, default=None),
        "until": max(at, default=None),
        "confidence": CONFIDENCE,
        "primary": sorted({pair.primary.version for pair in pairs}),
        "shadow": sorted({pair.shadow.version for pair in pairs}),
        "failures": dict(Counter(pair.shadow.failure for pair in pairs if pair.shadow.failure is not None)),
        "finish_reasons": [
            {"primary": primary, "shadow": shadow, "pairs": count}
            for (primary, shadow), count in Counter(
                (pair.primary.finish_reason, pair.shadow.finish_reason) for pair in compared
            ).most_common()
        ],
        "groups": groups,
        "quantiles": {
            "shares": list(QUANTILES),
            **{
                name: _quantiles(compared, NUMBERS[name]) for name in ("ttft_ms", "total_ms", "output_tokens")
            },
        },
    }


def _group(by: str | None, value: str | None, pairs: Sequence[ShadowPair]) -> dict[str, Any]:
    compared = [pair for pair in pairs if pair.shadow.failure is None]
    checks: dict[str, Measure] = {
        name: partial(_passes, name) for pair in compared for name in pair.primary.checks
    }
    columns: dict[str, list[float | None]] = {
        "likeness": [pair.likeness for pair in compared],
        "length_ratio": [
            pair.shadow.chars / pair.primary.chars if pair.primary.chars else None for pair in compared
        ],
    }
    for kind, measures in (("number", NUMBERS), ("check", checks)):
        for name, of in measures.items():
            columns[f"{kind}:{name}"] = [_difference(of(pair.shadow), of(pair.primary)) for pair in compared]
    found = bootstrap(columns, random.Random(SEED))
    calling = [pair for pair in compared if pair.primary.tool_calls or pair.shadow.tool_calls]
    languages = [(pair.primary.language, pair.shadow.language) for pair in compared]
    return {
        "by": by,
        "value": value,
        "pairs": len(pairs),
        "answered": _interval(wilson(len(compared), len(pairs))),
        "checks": [
            {
                "check": name,
                "pairs": len(both),
                "primary": _interval(wilson(sum(primary > 0 for primary, _ in both), len(both))),
                "shadow": _interval(wilson(sum(shadow > 0 for _, shadow in both), len(both))),
                "difference": _interval(found[f"check:{name}"]),
            }
            for name, of in checks.items()
            if (both := _both(compared, of))
        ],
        "numbers": [
            {
                "measure": name,
                "pairs": len(both),
                "primary": _spread([primary for primary, _ in both]),
                "shadow": _spread([shadow for _, shadow in both]),
                "difference": _interval(found[f"number:{name}"]),
            }
            for name, of in NUMBERS.items()
            if (both := _both(compared, of))
        ],
        "same_finish_reason": _share(
            [pair.primary.finish_reason == pair.shadow.finish_reason for pair in compared]
        ),
        "same_tools": _share([pair.primary.tools == pair.shadow.tools for pair in calling]),
        "same_calls": _share([pair.primary.calls == pair.shadow.calls for pair in calling]),
        "same_language": _share([one == other for one, other in languages if one and other]),
        **{name: _interval(found[name]) if name in found else None for name in ("length_ratio", "likeness")},
        "judged": dict(Counter(pair.judged for pair in pairs if pair.judged is not None)) or None,
    }


def _passes(check: str, side: ShadowSide) -> float | None:
    passed = side.checks.get(check)
    return None if passed is None else float(passed)


def _difference(shadow: float | None, primary: float | None) -> float | None:
    return None if shadow is None or primary is None else shadow - primary


def _both(pairs: Sequence[ShadowPair], of: Measure) -> list[tuple[float, float]]:
    values = ((of(pair.primary), of(pair.shadow)) for pair in pairs)
    return [(primary, shadow) for primary, shadow in values if primary is not None and shadow is not None]


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": round(sum(values) / len(values), 3),
        "p50": round(quantile(ordered, 0.5), 3),
        "p99": round(quantile(ordered, 0.99), 3),
    }


def _quantiles(pairs: Sequence[ShadowPair], of: Measure) -> dict[str, Any] | None:
    sides = {
        "primary": sorted(value for pair in pairs if (value := of(pair.primary)) is not None),
        "shadow": sorted(value for pair in pairs if (value := of(pair.shadow)) is not None),
    }
    if not all(sides.values()):
        return None
    return {
        side: [round(quantile(values, share), 3) for share in QUANTILES] for side, values in sides.items()
    }


def _share(flags: Sequence[bool]) -> dict[str, Any] | None:
    return {**_interval(wilson(sum(flags), len(flags))), "pairs": len(flags)} if flags else None


def _interval(one: Interval) -> dict[str, float | None]:
    return {
        "mean": round(one.mean, 4),
        "low": None if one.low is None else round(one.low, 4),
        "high": None if one.high is None else round(one.high, 4),
    }
