"""The figures of failures and of what is done about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from observability.labels import Bounded, Series
from resilience.degenerate import Sign
from resilience.events import AttemptFailed, Degenerated, LoadScaled, Recovered, Retried, RetryRefused
from resilience.failures import FailureKind

OOM_LAYERS = ("containment", "recovery")


class ResilienceMetrics(Collector):
    """Counts the guard's events; reads the retry budget when scraped.

    Args:
        registry: where the metrics are shown.
        backends: bound of the label ``backend``.
        known: backends that are shown from the start, so that ``increase()`` sees their first event.
    """

    def __init__(self, registry: CollectorRegistry, backends: Bounded, known: Iterable[str] = ()) -> None:
        kinds = Bounded([kind.value for kind in FailureKind])

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._failures = Series(
            counter("sluice_backend_failures_total", "Failed attempts, by what failed.", "backend", "kind"),
            backends, kinds,
        )  # fmt: skip
        self._retries = counter("sluice_retries_total", "Attempts made again on the same backend.")
        self._refused = Series(
            counter(
                "sluice_retries_refused_total", "Retries that the retry budget had no room for.", "backend"
            ),
            backends,
        )
        self._recovered = Series(
            counter(
                "sluice_recovered_total", "Attempts that succeeded after a failed one.", "backend", "kind"
            ),
            backends, kinds,
        )  # fmt: skip
        self._oom = Series(
            counter(
                "sluice_oom_contained_total",
                "Out of memory: answered by a retry (containment), load lowered (recovery).",
                "backend", "layer",
            ),
            backends, Bounded(OOM_LAYERS),
        )  # fmt: skip
        self._factor = Series(
            Gauge(
                "sluice_admitted_load_factor",
                "Share of its usual load that a backend is given; below 1 after it ran out of memory.",
                ("backend",),
                registry=registry,
            ),
            backends,
        )
        self._degenerate = Series(
            counter(
                "sluice_degenerate_answers_total",
                "Answers that became endless repetition or replacement characters, and what was done.",
                "backend", "sign", "action",
            ),
            backends, Bounded([sign.value for sign in Sign]), Bounded(cap=8),
        )  # fmt: skip
        for backend in known:
            self._factor(backend).set(1.0)
            for layer in OOM_LAYERS:
                self._oom(backend, layer)
        self._read_budget: Callable[[], Mapping[str, float]] = dict
        registry.register(self)

    def read_budget(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Where a scrape finds the retries left, by backend; must neither block nor raise."""
        self._read_budget = read

    def attempt_failed(self, event: AttemptFailed) -> None:
        """Count one failed attempt."""
        self._failures(event.backend, event.kind.value).inc()

    def retried(self, event: Retried) -> None:
        """Count one attempt made again."""
        self._retries.inc()

    def retry_refused(self, event: RetryRefused) -> None:
        """Count one that was not."""
        self._refused(event.backend).inc()

    def recovered(self, event: Recovered) -> None:
        """Count one success after a failure."""
        self._recovered(event.backend, event.kind.value).inc()
        if event.kind is FailureKind.CUDA_OOM:
            self._oom(event.backend, "containment").inc()

    def load_scaled(self, event: LoadScaled) -> None:
        """Show the share that a backend is given."""
        self._factor(event.backend).set(event.factor)
        if event.shrunk:
            self._oom(event.backend, "recovery").inc()

    def degenerated(self, event: Degenerated) -> None:
        """Count one answer that became nonsense."""
        self._degenerate(event.backend, event.sign.value, event.action).inc()

    def collect(self) -> Iterator[Metric]:
        """The gauges of one scrape."""
        left = GaugeMetricFamily(
            "sluice_retry_budget", "Retries that a backend may be given now.", labels=["backend"]
        )
        for backend, retries in self._read_budget().items():
            left.add_metric([backend], retries)
        yield left
