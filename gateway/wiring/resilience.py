"""Builds the retry loop, the output guard and the remedies for failures."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from admission.controller import AdmissionController
from gateway.config.resilience import ResilienceSection
from gateway.generation.output_guard import OutputGuard
from gateway.generation.remedies import Remediation
from gateway.generation.retry_loop import RetryLoop
from resilience.blame import Blame
from resilience.events import ResilienceEvent
from resilience.retry import RetryPolicy
from resilience.retry_budget import RetryBudget
from resilience.supervisor import SupervisorEvent


@dataclass(frozen=True, slots=True)
class Resilience:
    """What the dispatcher needs; ``retries_left`` is of the retry budget, by backend.

    ``on_engine_event`` takes the supervisor's events: an engine that ran out of memory is given less load.
    """

    retries: RetryLoop
    output_guard: OutputGuard
    retries_left: Callable[[], Mapping[str, float]]
    on_engine_event: Callable[[SupervisorEvent], None]


def make_resilience(
    section: ResilienceSection,
    *,
    admission: AdmissionController,
    restart_engine: Callable[[str, str], None],
    emit: Callable[[ResilienceEvent], None],
    clock: Callable[[], float],
) -> Resilience:
    """Build it.

    ``admission``'s gates are scaled when a backend's memory runs out; ``restart_engine`` takes a backend and
    the reason, and does nothing for one that is on no engine here.
    """
    remediation = Remediation(
        gate_of=admission.gate_name, scale=admission.scale, restart=restart_engine, clock=clock, emit=emit
    )

    def on_engine_event(event: SupervisorEvent) -> None:
        if event.backend:
            remediation.on_engine(event)

    budget = RetryBudget(
        share=section.retry_share, per_second=section.retry_per_second, most=section.retry_most
    )
    policy = RetryPolicy(budget, random.Random(), remediation.on_event)
    return Resilience(
        RetryLoop(policy, clock=clock, sleep=asyncio.sleep, emit=remediation.on_event),
        OutputGuard(section.degenerate_action, section.limits(), emit, Blame(clock)),
        lambda: {name: budget.left(name, clock()) for name in budget.backends},
        on_engine_event,
    )
