"""One metric's finding as JSON and as a row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from evaluation.adapter_regression.thresholds import RATIOS
from evaluation.adapter_regression.verdict import MetricFinding, MetricVerdict

_COLOURS: Mapping[MetricVerdict, str] = MappingProxyType(
    {
        MetricVerdict.PASSED: "green",
        MetricVerdict.WORSE: "red",
        MetricVerdict.UNSURE: "yellow",
        MetricVerdict.SHOWN: "dim",
    }
)


def finding_as_json(one: MetricFinding, active: str) -> dict[str, Any]:
    """Return a finding; ``active`` is the name of what the candidate is compared with."""
    return {
        "metric": one.metric,
        "standing": one.standing.value,
        "prompts": one.prompts,
        active: round(one.active, 6),
        "candidate": round(one.candidate, 6),
        "worse_by": round(one.change.mean, 4),
        "low": round(one.change.low, 4),
        "high": round(one.change.high, 4),
        "allowed": one.allowed,
        "named": list(one.named),
    }


def finding_cells(one: MetricFinding) -> Sequence[str]:
    """Return the row of a finding in a table for a terminal."""
    change = one.change
    return (
        one.metric,
        str(one.prompts),
        _value(one, one.active),
        _value(one, one.candidate),
        _change(one, change.mean),
        f"{_change(one, change.low)} … {_change(one, change.high)}",
        _allowed(one),
        f"[{_COLOURS[one.standing]}]{one.standing}[/]",
    )


def _value(one: MetricFinding, value: float) -> str:
    return f"{value * 1000:.2f} ms" if one.metric in RATIOS else f"{value:.3f}"


def _change(one: MetricFinding, value: float) -> str:
    return f"x {value:.2f}" if one.metric in RATIOS else f"{value:+.3f}"


def _allowed(one: MetricFinding) -> str:
    limit = "" if one.allowed is None else _change(one, one.allowed)
    least = "" if one.at_least is None else f"at least {one.at_least:g}"
    return ", ".join(filter(None, (limit, least))) or "-"
