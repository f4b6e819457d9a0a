"""The texts of a shadow report: its summary, and the rows of its tables."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

UNITS: Mapping[str, tuple[str, float]] = {
    "ttft_ms": ("first token, ms", 1.0),
    "total_ms": ("whole answer, ms", 1.0),
    "output_tokens": ("tokens of the answer", 1.0),
    "chars": ("characters of the answer", 1.0),
    "tool_calls": ("tool calls", 1.0),
    "reasoning_chars": ("characters of the reasoning", 1.0),
    "cost_nanousd": ("cost, US$ for 1,000", 1e-6),
}
"""For each measure: its name, and the factor by which its values are multiplied."""

HEADER = ("", "pairs", "primary", "shadow", "shadow minus primary")


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The summary above the tables."""
    yield (
        f"{report['compared']} of {report['pairs']} pairs compared, {_day(report['since'])} to"
        f" {_day(report['until'])} (UTC)"
    )
    yield f"primary: {', '.join(report['primary'])}   shadow: {', '.join(report['shadow'])}"
    if report["failures"]:
        failures = ", ".join(f"{count} {kind}" for kind, count in report["failures"].items())
        yield f"the shadow gave no answer: {failures}"
    for one in report["finish_reasons"]:
        yield f"finish reasons {one['primary']} / {one['shadow']} (primary / shadow): {one['pairs']}"


def title(group: Mapping[str, Any]) -> str:
    """The title of a group: what its pairs have in common."""
    name = "all" if group["by"] is None else f"{group['by']}: {group['value'] or '-'}"
    return f"{name} ({group['pairs']} pairs)"


def rows(group: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The cells of a group's table, under :data:`HEADER`."""
    for one in group["checks"]:
        sides = (_interval(one[side], percent=True) for side in ("primary", "shadow", "difference"))
        yield (f"passes {one['check']}", str(one["pairs"]), *sides)
    for one in group["numbers"]:
        name, scale = UNITS[one["measure"]]
        means = (
            f"{one[side]['mean'] * scale:.3g} (p50 {one[side]['p50'] * scale:.3g},"
            f" p99 {one[side]['p99'] * scale:.3g})"
            for side in ("primary", "shadow")
        )
        yield (name, str(one["pairs"]), *means, _interval(one["difference"], scale))
    for name, key, percent in (
        ("shadow answered", "answered", True),
        ("same finish reason", "same_finish_reason", True),
        ("same tools called", "same_tools", True),
        ("same calls with the same arguments", "same_calls", True),
        ("same language", "same_language", True),
        ("length, shadow / primary", "length_ratio", False),
        ("likeness by characters", "likeness", False),
    ):
        if group[key] is not None:
            yield (name, "", "", "", _interval(group[key], percent=percent))
    if group["judged"]:
        verdicts = ", ".join(f"{name} {count}" for name, count in sorted(group["judged"].items()))
        yield ("the judge prefers", str(sum(group["judged"].values())), "", "", verdicts)


def _interval(one: Mapping[str, Any], scale: float = 1.0, *, percent: bool = False) -> str:
    """A mean with its confidence interval, as text."""

    def shown(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value * scale:.3g}"

    if one["low"] is None:
        return shown(one["mean"])
    return f"{shown(one['mean'])} ({shown(one['low'])} … {shown(one['high'])})"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))
