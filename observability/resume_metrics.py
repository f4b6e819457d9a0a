"""The figures of answers that were gone on with."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from observability.labels import Bounded, Series
from resilience.events import Resumed


class ResumeMetrics:
    """Counts continuations.

    Args:
        registry: where the metric is shown.
        backends: bound of the labels ``from`` and ``to``.
    """

    def __init__(self, registry: CollectorRegistry, backends: Bounded) -> None:
        self._resumed = Series(
            Counter(
                "sluice_resumed_streams_total",
                "Calls that went on with an answer that another had begun, and how they ended.",
                ("from", "to", "mode", "result"),
                registry=registry,
            ),
            backends, backends, Bounded(cap=8), Bounded(cap=8),
        )  # fmt: skip

    def resumed(self, event: Resumed) -> None:
        """Count one."""
        self._resumed(event.source, event.target, event.mode, event.result).inc()
