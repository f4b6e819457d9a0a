"""The plots of a run: one for each limit, with the figures of all gateways and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.forwarding.gateways import TITLES, Name
from benchmarks.forwarding.report import BARS, OURS, Bar, Row, figure_text

INK, FAINT, GRID = "#22313f", "#7b8794", "#e4e9ee"
_LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4}
BLUE, GREY, RED = "#2a6fb0", "#b8c4cf", "#d64545"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write a PNG with a panel for each limit. Needs matplotlib; raises OSError when it cannot be written."""
    # Without pyplot, which keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.name is not Name.DIRECT]
    lines = -(-len(BARS) // 2)
    figure = Figure(
        figsize=(12, 0.8 + lines * (0.7 + 0.26 * len(shown))),
        dpi=130,
        facecolor="white",
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Forwarding beside other gateways, one process on one core; red: Sluice's limit (dotted: later)",
        fontsize=13, weight="bold", color=INK, x=0.01, ha="left",
    )  # fmt: skip
    for axes, bar in zip(figure.subplots(lines, 2).flat, BARS, strict=False):
        _panel(axes, bar, shown, [bar.value(row, rows) for row in shown])
    figure.savefig(path, format="png")


def _panel(axes: Any, bar: Bar, rows: Sequence[Row], values: Sequence[float | None]) -> None:
    limits = [bar.limit] if bar.relaxed is None else [bar.limit, bar.relaxed]
    said = f"{bar.sign} {bar.limit:g}" + (f", later {bar.relaxed:g}" if bar.relaxed else "")
    heading = f"{bar.title[0].upper()}{bar.title[1:]}: {said}"
    axes.set_title(heading, loc="left", fontsize=9.5, weight="bold", color=INK)
    known = [*limits, *(value for value in values if value is not None and value > 0)]
    low = min(known) / 2
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")  # within one decade matplotlib labels these ticks, too
    axes.set_xlim(low, max(known) * 4)
    colours = [BLUE if row.name in OURS else GREY for row in rows]
    axes.barh(range(len(rows)), [max(value or low, low) for value in values], color=colours, height=0.66)
    for limit, style in zip(limits, ("-", ":"), strict=False):
        axes.axvline(limit, color=RED, linewidth=1.2, linestyle=style)
    axes.set_yticks(range(len(rows)), [TITLES[row.name] for row in rows], fontsize=9, color=INK)
    axes.invert_yaxis()
    for place, value in enumerate(values):
        text = "overloaded or not measured" if value is None else figure_text(value)
        axes.text(
            max(value or low, low) * 1.08,
            place,
            text,
            va="center",
            fontsize=8.5,
            color=INK,
            zorder=3,
            bbox=_LABEL,
        )
    axes.grid(True, axis="x", which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, which="both", length=0, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)
