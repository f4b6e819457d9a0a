"""The plot of a run: CPU per request and per stream, and added latency, by gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.forwarding.gateways import TITLES, Name
from benchmarks.forwarding.report import OURS, Row, figure_text

INK, FAINT, GRID = "#22313f", "#7b8794", "#e4e9ee"
BLUE, GREY = "#2a6fb0", "#b8c4cf"

PANELS: Final[Sequence[tuple[str, Callable[[Row], float | None]]]] = (
    ("CPU a request, ms", lambda row: row.cpu_ms),
    ("CPU a paced stream of 140 tokens, ms", lambda row: row.paced_cpu_ms),
    ("Added p50 at 200 requests/s, ms", lambda row: row.added_fast_ms[0] if row.added_fast_ms else None),
    ("Added p99 at 200 requests/s, ms", lambda row: row.added_fast_ms[1] if row.added_fast_ms else None),
    ("Added TTFT p50 at 10 streams/s, ms", lambda row: row.added_first_ms[0] if row.added_first_ms else None),
    ("Added TTFT p99 at 10 streams/s, ms", lambda row: row.added_first_ms[1] if row.added_first_ms else None),
)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write a PNG. Needs matplotlib; raises OSError when it cannot be written."""
    # Without pyplot, which keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.name is not Name.DIRECT]
    figure = Figure(figsize=(12, 1.6 + 1.5 * len(shown)), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Forwarding beside other gateways: one process on one core, less is better, logarithmic",
        fontsize=13, weight="bold", color=INK, x=0.01, ha="left",
    )  # fmt: skip
    for axes, (heading, figure_of) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
        _panel(axes, heading, shown, [figure_of(row) for row in shown])
    figure.savefig(path, format="png")


def _panel(axes: Any, heading: str, rows: Sequence[Row], values: Sequence[float | None]) -> None:
    axes.set_title(heading, loc="left", fontsize=10.5, weight="bold", color=INK)
    known = [value for value in values if value is not None and value > 0]
    low = min(known, default=1) / 2
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(low, max(known, default=1) * 4)
    colours = [BLUE if row.name in OURS else GREY for row in rows]
    axes.barh(range(len(rows)), [max(value or low, low) for value in values], color=colours, height=0.66)
    axes.set_yticks(range(len(rows)), [TITLES[row.name] for row in rows], fontsize=9, color=INK)
    axes.invert_yaxis()
    for place, value in enumerate(values):
        text = "overloaded or not measured" if value is None else figure_text(value)
        axes.text(max(value or low, low) * 1.08, place, text, va="center", fontsize=8.5, color=INK)
    axes.grid(True, axis="x", which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, which="both", length=0, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)
