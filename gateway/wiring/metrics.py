"""What the metrics read of the gateway when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import psutil

from gateway.health.first_ready import FirstReady
from gateway.health.probe import HealthProbe
from gateway.routing.revision import Revision
from observability.health_metrics import HealthCollector
from observability.slo_metrics import NO_TARGETS, SloTargets


class Targets:
    """The service levels of the routes in force, made once a revision.

    Args:
        revision: the one in force.
    """

    def __init__(self, revision: Callable[[], Revision]) -> None:
        self._revision = revision
        self._of: Revision | None = None
        self._targets = NO_TARGETS

    def __call__(self) -> Mapping[str, SloTargets]:
        """By route."""
        revision = self._revision()
        if revision is not self._of:
            self._targets = MappingProxyType(
                {
                    name: SloTargets(route.ttft_slo_ms, route.total_slo_ms)
                    for name, route in revision.routes.items()
                }
            )
            self._of = revision
        return self._targets


def first_ready(
    health: HealthProbe, *, clock: Callable[[], float], unix_time: Callable[[], float]
) -> FirstReady:
    """Counts from the process' start, which the kernel knows."""
    age_s, begun = max(0.0, unix_time() - psutil.Process().create_time()), clock()
    return FirstReady(lambda: all(health.checks().values()), lambda: age_s + clock() - begun)


def health_collector(health: HealthProbe, first: FirstReady) -> HealthCollector:
    """Shows what ``/ready`` would say, and how long that took to be true."""

    def read() -> tuple[bool, Mapping[str, bool]]:
        checks = health.checks()
        return all(checks.values()), checks

    return HealthCollector(read, first.after_s)
