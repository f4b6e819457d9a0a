"""The guard around every backend, and what hangs on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from admission.controller import AdmissionController
from gateway.config.resilience import ResilienceSection
from gateway.generation.output_guard import OutputGuard
from gateway.generation.remedies import Remediation
from observability.resilience_metrics import ResilienceMetrics
from resilience.blame import Blame
from resilience.events import ResilienceEvent
from resilience.guard import Guard
from resilience.retry_budget import RetryBudget


@dataclass(frozen=True, slots=True)
class Resilience:
    """What the dispatcher needs."""

    guard: Guard
    watch: OutputGuard


def make_resilience(
    section: ResilienceSection,
    *,
    admission: AdmissionController,
    on_engine: Collection[str],
    restart_engine: Callable[[str], object] | None,
    metrics: ResilienceMetrics,
    emit: Callable[[ResilienceEvent], None],
    clock: Callable[[], float],
) -> Resilience:
    """Construct them.

    Args:
        section: the configuration.
        admission: gives backends less or more.
        on_engine: names of the backends on the engine in process.
        restart_engine: asks for another engine, with the reason; ``None`` without one in process.
        metrics: shows what is left of the budget.
        emit: takes each event; must not block.
        clock: seconds, monotonic.
    """

    def restart(backend: str, reason: str) -> None:
        if restart_engine is not None and backend in on_engine:
            restart_engine(reason)

    recovery = Remediation(
        gate_of=admission.gate_name, scale=admission.scale, restart=restart, clock=clock, emit=emit
    )
    budget = RetryBudget(
        share=section.retry_share, per_second=section.retry_per_second, most=section.retry_most
    )
    metrics.read_budget(lambda: {name: budget.left(name, clock()) for name in budget.backends})
    guard = Guard(clock=clock, sleep=asyncio.sleep, random=random.Random(), emit=recovery.saw, budget=budget)
    watch = OutputGuard(section.degenerate_action, section.limits(), emit, Blame(clock))
    return Resilience(guard, watch)
