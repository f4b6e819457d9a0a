"""Histograms that are written far more often than they are scraped.

A request is observed some fifteen times. The library's histogram takes two locks and walks its buckets each
time; here an observation is one binary search, and buckets are added up when a scrape asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from observability.labels import Bounded


class Buckets:
    """Counts observations by bucket. Not for several threads: it lives on the event loop.

    Args:
        bounds: upper bounds of the buckets, ascending; an observation on a bound is below it.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._sum += value  # first, because it refuses what is no number
        self._counts[bisect_left(self._bounds, value)] += 1

    @property
    def sum(self) -> float:
        """All observations added up."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many observations lie at or below it, as Prometheus counts."""
        seen, cumulative = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            seen += count
            cumulative.append(("+Inf" if bound == inf else repr(float(bound)), float(seen)))
        return cumulative


class Histogram(Collector):
    """One metric: a distribution, or one for each value of a label.

    Args:
        name: the metric's.
        text: its help.
        bounds: upper bounds of its buckets, ascending.
        registry: where it is scraped from.
        label: the label's name, if it has one.
        values: bounds the label's values.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        *,
        label: str | None = None,
        values: Bounded | None = None,
    ) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._labels = () if label is None else (label,)
        self._values = values or Bounded()
        self._by_value: dict[str, Buckets] = {}
        self._alone = Buckets(bounds) if label is None else None
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count one observation of a metric without a label."""
        assert self._alone is not None, "this metric has a label"
        self._alone.observe(value)

    def of(self, value: str) -> Buckets:
        """The distribution of one value of the label."""
        found = self._by_value.get(value)
        if found is None:
            found = self._by_value.setdefault(self._values(value), Buckets(self._bounds))
        return found

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        if self._alone is not None:
            family.add_metric((), self._alone.buckets(), self._alone.sum)
        for value, distribution in self._by_value.items():
            family.add_metric((value,), distribution.buckets(), distribution.sum)
        yield family
