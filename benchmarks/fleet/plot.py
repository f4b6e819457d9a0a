"""A plot of the figures of a fleet over its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.fleet.decisions import Cost
from benchmarks.fleet.measures import Figures


def plot(rows: Mapping[str, Mapping[int, Figures]], costs: Sequence[Cost], path: Path) -> None:
    """Plot goodput per worker, hits, balance and the cost of a decision; one line per trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: tuple[tuple[str, Callable[[Figures], float]], ...] = (
        ("goodput a worker, requests/s", lambda one: one.goodput),
        ("prompt tokens found in a cache, % of ideal", lambda one: 100 * one.hits / one.ideal),
        ("requests on a worker, p99 / mean", lambda one: one.balance),
    )
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4))
    for axis, (label, value) in zip(axes, panels, strict=False):
        for number, (name, by_size) in enumerate(rows.items()):
            if "%" in label and not any(one.ideal for one in by_size.values()):
                continue
            values = [value(one) for one in by_size.values()]
            axis.plot(list(by_size), values, "o-", label=name, color=f"C{number}")
        axis.set_ylim(bottom=0)
        axis.set_title(label, fontsize=9)
        axis.legend(fontsize=8)
    sizes = [cost.workers for cost in costs]
    axes[3].plot(sizes, [cost.whole_p50_us for cost in costs], "o-", label="all looked at")
    axes[3].plot(sizes, [cost.short_mean_us for cost in costs], "o-", label="shortlist, mean")
    axes[3].set_yscale("log")
    axes[3].set_title("placing a request, µs CPU", fontsize=9)
    axes[3].legend(fontsize=8)
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xlabel("workers")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
