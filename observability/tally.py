"""Counters of two labels that are written with every request: one label bounded, the other a closed list.

The library's counter takes a lock and a look-up for each of them; here a request finds one row and adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.labels import Bounded


class LabelCounter(Collector):
    """One counter by ``label`` and ``kind_label``. Not for several threads: it lives on the event loop.

    Args:
        name: the metric's, without ``_total``.
        text: its help.
        label: the label that comes from outside.
        kind_label: the label whose values are ``kinds``.
        kinds: all its values; a row is shown with every one of them from its first moment, so that
            ``increase()`` sees the first event too.
        values: bounds the values of ``label``.
        registry: where it is scraped from.
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
        """The counts of one value, in the order of ``kinds``; add to them in place."""
        found = self._rows.get(value) if value else None
        if found is None:
            found = self._rows.setdefault(self._values(value), [0] * len(self._kinds))
        return found

    def collect(self) -> Iterator[Metric]:
        """The family of one scrape."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for value, counts in self._rows.items():
            for kind, count in zip(self._kinds, counts, strict=True):
                family.add_metric((value, kind), count)
        yield family
