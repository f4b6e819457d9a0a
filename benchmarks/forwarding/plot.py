"""The plots of a run: one for each limit, with the figures of all gateways and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.forwarding.gateways import TITLES, Name
from benchmarks.forwarding.report import BARS, OURS, Bar, Report, figure_text

INK, FAINT, GRID = "#22313f", "#7b8794", "#e4e9ee"
_LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4}
BLUE, GREY, RED = "#2a6fb0", "#b8c4cf", "#d64545"


def draw(path: Path, report: Report) -> None:
    """Write a PNG with a panel for each limit. Needs matplotlib; raises OSError when it cannot be written."""
    # Without pyplot, which keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row.name for row in report.rows if row.name is not Name.DIRECT]
    lines = -(-len(BARS) // 2)
    figure = Figure(
        figsize=(12, 0.8 + lines * (0.7 + 0.26 * len(shown))),
        dpi=130,
        facecolor="white",
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Forwarding, one gateway process on one core. Black: lowest and highest round. Red: Sluice's limit.",
        fontsize=12, weight="bold", color=INK, x=0.01, ha="left",
    )  # fmt: skip
    for axes, bar in zip(figure.subplots(lines, 2).flat, BARS, strict=False):
        _panel(axes, bar, shown, [bar.spread(name, report.rounds) for name in shown])
    figure.savefig(path, format="png")


def _panel(
    axes: Any, bar: Bar, names: Sequence[Name], spreads: Sequence[tuple[float, float, float] | None]
) -> None:
    limits = [bar.limit] if bar.relaxed is None else [bar.limit, bar.relaxed]
    said = f"{bar.sign} {bar.limit:g}" + (f" or {bar.relaxed:g}" if bar.relaxed else "")
    heading = f"{bar.title[0].upper()}{bar.title[1:]}: {said}"
    axes.set_title(heading, loc="left", fontsize=9.5, weight="bold", color=INK)
    known = [*limits, *(value for spread in spreads if spread is not None for value in spread if value > 0)]
    least = min(known) / 2
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")  # within one decade matplotlib labels these ticks, too
    axes.set_xlim(least, max(known) * 6)
    # A logarithmic axis has no place for 0 and less: such values are at its left end.
    shown = [[max(value, least) for value in spread or (least,) * 3] for spread in spreads]
    colours = [BLUE if name in OURS else GREY for name in names]
    axes.barh(range(len(names)), [middle for middle, _, _ in shown], color=colours, height=0.66)
    axes.hlines(range(len(names)), *([one[end] for one in shown] for end in (1, 2)), color=INK, linewidth=1)
    for limit, style in zip(limits, ("-", ":"), strict=False):
        axes.axvline(limit, color=RED, linewidth=1.2, linestyle=style)
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names], fontsize=9, color=INK)
    axes.invert_yaxis()
    for place, (spread, (_, _, high)) in enumerate(zip(spreads, shown, strict=True)):
        text = "overloaded or not measured" if spread is None else figure_text(spread[0])
        axes.text(high * 1.08, place, text, va="center", fontsize=8.5, color=INK, zorder=3, bbox=_LABEL)
    axes.grid(True, axis="x", which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, which="both", length=0, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)
