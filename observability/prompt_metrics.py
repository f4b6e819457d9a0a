"""Metrics of canonical prompts: tokens that a prefix cache should find, that it found, and volatile content.

``sluice_prompt_cached_ratio`` compares the found tokens, over the latest requests of each prompt version,
with two figures: with the tokens that the backend had computed before (``against="expected"``; the ratio
falls when the engine evicts them), and with the whole prefix (``against="prefix"``; the ratio falls when the
prefix itself changes from request to request).
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.events import RequestRecord
from observability.labels import Bounded, counted
from observability.scrape import gauge

# After this many later requests of its version, a request has half its weight: the ratio is steady, but
# follows a changed prompt within some hundred requests.
HALF_LIFE_REQUESTS = 100
_DECAY = 0.5 ** (1 / HALF_LIFE_REQUESTS)


class _DecayingSums:
    """Exponentially decaying sums of one prompt version's tokens."""

    def __init__(self) -> None:
        self.prefix = self.expected = self.cached = self.cached_of_expected = 0.0

    def add(self, tokens: Iterable[tuple[int, int, int]]) -> None:
        """Add requests: the tokens of each one's prefix, those expected in the cache, and those found."""
        for prefix, expected, cached in tokens:
            self.prefix = self.prefix * _DECAY + prefix
            self.cached = self.cached * _DECAY + cached
            if expected:
                self.expected = self.expected * _DECAY + expected
                self.cached_of_expected = self.cached_of_expected * _DECAY + min(cached, expected)


class PromptMetrics(Collector):
    """Counts the prompts of finished requests."""

    def __init__(self, registry: CollectorRegistry, versions: Bounded) -> None:
        self._versions = versions
        self._prefix, self._expected, self._cached = (
            counted(registry, name, text, prompt_version=versions)
            for name, text in (
                ("sluice_prompt_prefix_tokens_total", "Tokens of stable prefixes, whole blocks only."),
                ("sluice_prompt_expected_cached_tokens_total",
                 "Prefix tokens that the same backend had computed before for the same tenant and adapter."),
                ("sluice_prompt_cached_tokens_total", "Prefix tokens that were found in a prefix cache."),
            )
        )  # fmt: skip
        self._volatile = counted(
            registry, "sluice_prompt_volatile_total",
            "Requests with volatile content in the caller's system messages, by kind.",
            kind=Bounded(), action=Bounded(),
        )  # fmt: skip
        self._recent: dict[str, _DecayingSums] = {}
        registry.register(self)

    def count(self, records: Iterable[RequestRecord]) -> None:
        by_version: dict[str | None, list[tuple[int, int, int]]] = {}
        for record in records:
            for kind in record.volatile or ():
                self._volatile(kind, record.volatile_action).inc()
            if prefix := record.prefix_tokens:
                expected, cached = record.prefix_expected_tokens or 0, record.prefix_cached_tokens or 0
                by_version.setdefault(record.prompt_version, []).append((prefix, expected, cached))
        for version, tokens in by_version.items():
            sums = map(sum, zip(*tokens, strict=True))
            for counter, count in zip((self._prefix, self._expected, self._cached), sums, strict=True):
                counter(version).inc(count)
            self._recent.setdefault(self._versions(version), _DecayingSums()).add(tokens)

    def collect(self) -> Iterator[Metric]:
        ratios = {}
        for version, recent in list(self._recent.items()):
            ratios[version, "prefix"] = recent.cached / recent.prefix
            if recent.expected:
                ratios[version, "expected"] = recent.cached_of_expected / recent.expected
        yield gauge(
            "sluice_prompt_cached_ratio",
            "Prefix tokens found in the cache, divided by those expected or by all; of the latest requests.",
            ratios,
            "prompt_version", "against",
        )  # fmt: skip
