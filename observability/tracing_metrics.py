"""What became of traces, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.trace_sampling import TraceFigures


class TraceCollector(Collector):
    """``sluice_traces_total`` and ``sluice_traces_waiting``.

    Args:
        read: the figures now; must neither block nor raise.
    """

    def __init__(self, read: Callable[[], TraceFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        figures = self._read()
        traces = CounterMetricFamily("sluice_traces", "Traces by what became of them.", labels=["result"])
        for result in ("sent", "dropped", "failed", "left_out"):
            traces.add_metric([result], getattr(figures, result))
        yield traces
        waiting = GaugeMetricFamily("sluice_traces_waiting", "Traces waiting for the collector.")
        waiting.add_metric([], figures.waiting)
        yield waiting


class LogCollector(Collector):
    """``sluice_log_lines_dropped_total``.

    Args:
        read: lines lost so far; must neither block nor raise.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        dropped = CounterMetricFamily(
            "sluice_log_lines_dropped", "Log lines lost because they came faster than they could be written."
        )
        dropped.add_metric([], self._read())
        yield dropped
