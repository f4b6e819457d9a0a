"""The figures of canonical prompts: what a prefix cache should find of them, what it did, what was volatile.

``cached_ratio`` compares twice, over the latest requests of each prompt version: with what the backend had
computed before (``against="expected"``), which falls when an engine does not keep what it has; and with the
whole prefix (``against="prefix"``), which falls when the prefix itself changes from request to request.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.events import RequestRecord
from observability.labels import Bounded, Series

# A request weighs half as much after this many more of its version: long enough for a steady figure, short
# enough that a changed prompt is seen within some hundred requests.
HALF_LIFE_REQUESTS = 100
_KEEP = 0.5 ** (1 / HALF_LIFE_REQUESTS)


class _Recent:
    """Fading sums of one prompt version's tokens."""

    __slots__ = ("cached", "cached_of_expected", "expected", "prefix")

    def __init__(self) -> None:
        self.prefix = self.expected = self.cached = self.cached_of_expected = 0.0

    def take(self, prefix: int, expected: int, cached: int) -> None:
        self.prefix = self.prefix * _KEEP + prefix
        self.cached = self.cached * _KEEP + cached
        if expected:
            self.expected = self.expected * _KEEP + expected
            self.cached_of_expected = self.cached_of_expected * _KEEP + min(cached, expected)


class PromptMetrics(Collector):
    """Counts what records say of prompts.

    Args:
        registry: where the metrics are shown.
        versions: bound of the label ``prompt_version``.
    """

    def __init__(self, registry: CollectorRegistry, versions: Bounded) -> None:
        self._versions = versions
        self._prefix, self._expected, self._cached = (
            Series(Counter(name, text, ("prompt_version",), registry=registry), versions)
            for name, text in (
                ("sluice_prompt_prefix_tokens_total", "Tokens of stable prefixes, whole blocks only."),
                (
                    "sluice_prompt_expected_cached_tokens_total",
                    "Those that the same backend had computed before for the same tenant and adapter.",
                ),
                ("sluice_prompt_cached_tokens_total", "Those of them that were found in a prefix cache."),
            )
        )
        self._volatile = Series(
            Counter(
                "sluice_prompt_volatile_total",
                "Requests with volatile content in the caller's system messages, by its kinds.",
                ("kind", "action"),
                registry=registry,
            ),
            Bounded(),
            Bounded(),
        )
        self._recent: dict[str, _Recent] = {}
        registry.register(self)

    def request(self, record: RequestRecord) -> None:
        """Count one finished request."""
        for kind in record.volatile or ():
            self._volatile(kind, record.volatile_action).inc()
        prefix = record.prefix_tokens
        if not prefix:
            return
        expected, cached = record.prefix_expected_tokens or 0, record.prefix_cached_tokens or 0
        version = record.prompt_version
        self._prefix(version).inc(prefix)
        self._expected(version).inc(expected)
        self._cached(version).inc(cached)
        label = self._versions(version)
        recent = self._recent.get(label)
        if recent is None:
            recent = self._recent[label] = _Recent()
        recent.take(prefix, expected, cached)

    def collect(self) -> Iterator[Metric]:
        """The gauge of one scrape."""
        gauge = GaugeMetricFamily(
            "sluice_prompt_cached_ratio",
            "Prefix tokens found in the cache, of those expected and of all, over the latest requests.",
            labels=["prompt_version", "against"],
        )
        for version, recent in list(self._recent.items()):
            gauge.add_metric([version, "prefix"], recent.cached / recent.prefix)
            if recent.expected:
                gauge.add_metric([version, "expected"], recent.cached_of_expected / recent.expected)
        yield gauge
