"""A report for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

UNITS: Mapping[str, tuple[str, float]] = {
    "ttft_ms": ("first token, ms", 1.0),
    "total_ms": ("whole answer, ms", 1.0),
    "output_tokens": ("tokens of the answer", 1.0),
    "chars": ("characters of the answer", 1.0),
    "cost_nanousd": ("cost, US$ for 1,000", 1e-6),
}
"""By measure: its name, and what its values are multiplied by to be shown."""


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What stands above the tables."""
    yield (
        f"{report['compared']} of {report['pairs']} pairs compared, {_day(report['since'])} to"
        f" {_day(report['until'])} (UTC)"
    )
    yield f"primary: {', '.join(report['primary'])}   shadow: {', '.join(report['shadow'])}"
    if report["failures"]:
        told = ", ".join(f"{count} {kind}" for kind, count in report["failures"].items())
        yield f"the shadow gave no answer: {told}"
    for one in report["finish_reasons"]:
        yield f"ended {one['primary']} / {one['shadow']} (primary / shadow): {one['pairs']}"


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """One table a group."""
    for group in report["groups"]:
        yield _table(group)


def title(group: Mapping[str, Any]) -> str:
    """What a group's pairs have in common."""
    name = "all" if group["by"] is None else f"{group['by']}: {group['value'] or '-'}"
    return f"{name} ({group['pairs']} pairs)"


def interval(one: Mapping[str, Any] | None, scale: float = 1.0, *, percent: bool = False) -> str:
    """A mean and its interval."""
    if one is None:
        return "-"

    def told(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value * scale:.3g}"

    if one["low"] is None:
        return told(one["mean"])
    return f"{told(one['mean'])} ({told(one['low'])} … {told(one['high'])})"


def _table(group: Mapping[str, Any]) -> Table:
    table = Table(title=escape(title(group)), title_justify="left")
    table.add_column("")
    for name in ("pairs", "primary", "shadow", "shadow less primary"):
        table.add_column(name, justify="right")
    for one in group["checks"]:
        table.add_row(
            f"passes {escape(one['check'])}",
            str(one["pairs"]),
            interval(one["primary"], percent=True),
            interval(one["shadow"], percent=True),
            interval(one["difference"], percent=True),
        )
    for one in group["numbers"]:
        name, scale = UNITS[one["measure"]]
        sides = (
            f"{one[side]['mean'] * scale:.3g} (p50 {one[side]['p50'] * scale:.3g},"
            f" p99 {one[side]['p99'] * scale:.3g})"
            for side in ("primary", "shadow")
        )
        table.add_row(name, str(one["pairs"]), *sides, interval(one["difference"], scale))
    table.add_section()
    for name, key, percent in (
        ("shadow answered", "answered", True),
        ("same end", "same_finish_reason", True),
        ("same language", "same_language", True),
        ("length, shadow / primary", "length_ratio", False),
        ("likeness by characters", "likeness", False),
        ("likeness by meaning", "meaning", False),
    ):
        if group[key] is not None:
            table.add_row(name, "", "", "", interval(group[key], percent=percent))
    if group["judged"]:
        told = ", ".join(f"{name} {count}" for name, count in sorted(group["judged"].items()))
        table.add_row("the judge prefers", str(sum(group["judged"].values())), "", "", escape(told))
    return table


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))
