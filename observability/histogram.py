"""A histogram and a counter that are written far more often than they are scraped.

Observations are counted many together, a count is one addition in a list, and a scrape computes the sums;
the types of ``prometheus_client`` lock each time. Not thread-safe: only the event loop may use these types.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from observability.labels import Bounded


class Buckets:
    """Counts observations by bucket; an observation on an upper bound belongs to its bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, *values: float) -> None:
        self.sum += sum(values)  # first, because it raises for a value that is no number
        # One search for each bucket, not for each value: many are counted together.
        ordered, counts, below = sorted(values), self.counts, 0
        for place, bound in enumerate(self.bounds):
            upto = bisect_right(ordered, bound, below)
            counts[place] += upto - below
            below = upto
        counts[-1] += len(ordered) - below


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Each upper bound, and the number of observations at or below it, as in Prometheus."""
    edges = ["+Inf" if bound == inf else repr(float(bound)) for bound in (*bounds, inf)]
    return list(zip(edges, map(float, accumulate(counts)), strict=True))


class Histogram(Collector):
    """One metric: a distribution, or one for each value of ``label``, bounded by ``values``."""

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

    def observe(self, *values: float) -> None:
        """Count observations of a metric without a label."""
        assert self._alone is not None, "this metric has a label"
        self._alone.observe(*values)

    def of(self, value: str) -> Buckets:
        found = self._by_value.get(value)
        if found is None:
            found = self._by_value.setdefault(self._values(value), Buckets(self._bounds))
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        if self._alone is not None:
            family.add_metric((), cumulative(self._bounds, self._alone.counts), self._alone.sum)
        for value, found in self._by_value.items():
            family.add_metric((value,), cumulative(self._bounds, found.counts), found.sum)
        yield family


class LabelCounter(Collector):
    """A counter (``name`` without ``_total``) with a label of external values and a label of the closed list
    ``kinds``; each row shows all kinds from its start, so that ``increase()`` includes the first event.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        kind_label: str,
        kinds: Sequence[str],
        values: Bounded,
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text = name, text
        self._labels = (label, kind_label)
        self._kinds = tuple(kinds)
        self._values = values
        self._rows: dict[str, list[int]] = {}
        registry.register(self)

    def of(self, value: str | None) -> list[int]:
        """The counts of one value, in the order of ``kinds``; the caller adds to them in place."""
        found = self._rows.get(value) if value else None
        if found is None:
            found = self._rows.setdefault(self._values(value), [0] * len(self._kinds))
        return found

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for value, counts in self._rows.items():
            for kind, count in zip(self._kinds, counts, strict=True):
                family.add_metric((value, kind), count)
        yield family
