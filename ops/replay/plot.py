"""Plots a replay: distributions of TTFT and total time, and all requests over time."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from gateway.shadow.statistics import quantile
from ops.replay.outcome import ReplayedRequest
from ops.replay.report import ReplayReport

INK, FAINT, GRID = "#22313f", "#7b8794", "#e4e9ee"
BLUE, GREEN, RED, AMBER = "#2a6fb0", "#2f9e6e", "#d64545", "#e0a030"
PERCENTILES = (0.50, 0.90, 0.99)


def draw(path: Path, result: ReplayReport, *, title: str, subtitle: str) -> None:
    """Write a PNG to ``path``. Raises OSError when it cannot be written; needs matplotlib."""
    # pyplot is not used: it has global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(12, 7.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, 0.9), h_pad=0.12, w_pad=0.12))
    figure.text(0.012, 0.965, title, fontsize=15, weight="bold", color=INK, va="center")
    figure.text(0.012, 0.928, subtitle, fontsize=9.5, color=FAINT, va="center")
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.05))

    outcomes = result.run.outcomes
    whole = [outcome for outcome in outcomes if outcome.ok]
    ttft = sorted(o.ttft_s * 1000 for o in whole if o.ttft_s is not None)
    total = sorted(o.total_s * 1000 for o in whole)
    _cdf(figure.add_subplot(grid[0, 0]), ttft, "Time to first token", BLUE, result.slo.ttft_ms)
    _cdf(figure.add_subplot(grid[0, 1]), total, "Whole answer", GREEN, result.slo.total_ms)
    _timeline(figure.add_subplot(grid[1, :]), outcomes)
    figure.savefig(path, format="png")


def _plain(axes: Any, heading: str) -> None:
    axes.set_title(heading, loc="left", fontsize=11, weight="bold", color=INK)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8.5, which="both", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _log_time(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    steps = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"))
    axis.set_minor_formatter(NullFormatter())


def _cdf(axes: Any, ordered: Sequence[float], heading: str, colour: str, slo_ms: float) -> None:
    _plain(axes, heading)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1], ["0", "25 %", "50 %", "75 %", "90 %", "100 %"])
    if not ordered:
        axes.text(0.5, 0.5, "no whole answer", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_xticks([])
        return
    axes.set_xscale("log")
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.plot(ordered, shares, color=colour, linewidth=2.2, drawstyle="steps-post", solid_capstyle="round")
    axes.fill_between(ordered, shares, step="post", color=colour, alpha=0.08, linewidth=0)
    axes.set_xlim(min(ordered[0], slo_ms) * 0.8, max(ordered[-1], slo_ms) * 1.25)
    _log_time(axes.xaxis)

    axes.axvline(slo_ms, color=AMBER, linewidth=1.4, linestyle=(0, (4, 3)))
    inside = sum(value <= slo_ms for value in ordered) / len(ordered)
    # The label is next to the line, on the side with more room.
    low, high = axes.get_xlim()
    right = slo_ms * slo_ms < low * high
    axes.annotate(
        f"{inside:.0%} within {slo_ms:g} ms", (slo_ms, 0.04), xytext=(5 if right else -5, 0),
        textcoords="offset points", ha="left" if right else "right",
        fontsize=8.5, color=AMBER, weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )  # fmt: skip
    marks = [(share, quantile(ordered, share)) for share in PERCENTILES]
    axes.scatter([at for _, at in marks], [share for share, _ in marks], s=22, color=colour, zorder=3)
    reported = "   ".join(f"p{share * 100:g} {_time(at)}" for share, at in marks)
    axes.text(1, 1.045, reported, transform=axes.transAxes, ha="right", fontsize=9, color=INK)


def _timeline(axes: Any, outcomes: Sequence[ReplayedRequest]) -> None:
    _plain(axes, "Over the replay")
    axes.set_xlabel("seconds since the start, when the request was sent", fontsize=8.5, color=FAINT)
    whole = [outcome for outcome in outcomes if outcome.ok]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    first = [outcome for outcome in whole if outcome.ttft_s]
    if outcomes:
        axes.set_yscale("log")
    dots = {"s": 11, "alpha": 0.55, "linewidths": 0}
    axes.scatter(
        [o.sent_s for o in whole], [o.total_s * 1000 for o in whole], color=GREEN, label="total", **dots
    )
    axes.scatter(
        [o.sent_s for o in first], [(o.ttft_s or 0) * 1000 for o in first], color=BLUE, label="TTFT", **dots
    )
    if failed:
        axes.scatter(
            [o.sent_s for o in failed], [max(o.total_s * 1000, 0.1) for o in failed],
            color=RED, marker="x", s=30, linewidths=1.4, label=f"failed ({len(failed)})", zorder=3,
        )  # fmt: skip

    if outcomes:
        _log_time(axes.yaxis)
    load = axes.twinx()
    load.set_zorder(axes.get_zorder() - 1)
    axes.patch.set_visible(False)
    times, counts = in_flight_over_time(outcomes)
    load.fill_between(times, counts, step="post", color=FAINT, alpha=0.16, linewidth=0, label="in flight")
    load.set_ylim(0, max(counts, default=1) * 1.6 or 1)
    load.set_ylabel("in flight", fontsize=8.5, color=FAINT)
    load.tick_params(colors=FAINT, labelsize=8.5, length=0)
    for side in ("top", "right", "left", "bottom"):
        load.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    more, more_labels = load.get_legend_handles_labels()
    axes.legend(
        handles + more, labels + more_labels, loc="upper right", ncols=4, frameon=False, fontsize=8.5,
        labelcolor=INK, bbox_to_anchor=(1, 1.12), handletextpad=0.4, columnspacing=1.2,
    )  # fmt: skip


def in_flight_over_time(outcomes: Sequence[ReplayedRequest]) -> tuple[list[float], list[int]]:
    """The times at which the number of requests in flight changed, and the new numbers."""
    changes = sorted([(o.sent_s, 1) for o in outcomes] + [(o.done_s, -1) for o in outcomes])
    times = [0.0, *(at for at, _ in changes)]
    return times, list(accumulate((change for _, change in changes), initial=0))


def _time(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
