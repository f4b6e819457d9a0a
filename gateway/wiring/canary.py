"""The part of the composition root that makes the canary's driver and desk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.admin.canary import CanaryAdmin
from gateway.routing.canary_loop import CanaryDriver
from gateway.routing.canary_records import STREAM
from gateway.routing.canary_tally import CanaryTally
from gateway.routing.projection import RoutingProjection
from gateway.state.audit import Audit
from gateway.wiring.state import StateParts
from observability.canary_metrics import CanaryCollector, CanaryFigures


@dataclass(frozen=True, slots=True)
class Canary:
    """The canary as a gateway holds it.

    Args:
        driver: judges and acts, when it is this process' turn.
        desk: for operators.
        tally: what this process sees.
    """

    driver: CanaryDriver
    desk: CanaryAdmin
    tally: CanaryTally

    def collector(self) -> CanaryCollector:
        """For the metrics."""

        def read() -> CanaryFigures | None:
            standing = self.driver.standing
            if standing is None:
                return None
            return CanaryFigures(
                standing.plan.route,
                standing.plan.backend,
                standing.phase.value,
                standing.wanted.get(standing.plan.backend, 0.0),
                standing.canary_requests,
                {check: evidence.log_e for check, evidence in standing.evidence.items()},
                standing.plan.bound,
            )

        return CanaryCollector(read)


def make_canary(
    state: StateParts,
    book: RoutingProjection,
    audit: Audit,
    *,
    new_id: Callable[[str], str],
    unix_time: Callable[[], float],
) -> Canary:
    """Build it; its stream is followed as the routing's is."""
    tally = CanaryTally(lambda name: book.current().routes.get(name), unix_time)
    driver = CanaryDriver(state.store, book, audit, tally, me=new_id("proc"), unix_time=unix_time)
    driver.follow(state.follow_latest(STREAM, driver.take))
    desk = CanaryAdmin(driver, book, state.store, audit, new_id=lambda: new_id("canary"), unix_time=unix_time)
    return Canary(driver, desk, tally)
