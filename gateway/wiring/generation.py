"""The layer of generation: the guard around every backend, the response cache and the fallback chain."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from admission.controller import AdmissionController
from gateway.config.resilience import ResilienceSection
from gateway.generation.answer_cache import AnswerCache
from gateway.generation.dispatcher import Dispatcher
from gateway.generation.fallback import FallbackChain
from gateway.generation.output_guard import OutputGuard
from gateway.generation.remedies import Remediation
from gateway.generation.retry_loop import RetryLoop
from gateway.wiring.accounts import AccountParts
from gateway.wiring.backends import BackendParts
from gateway.wiring.cache import make_answers, make_leg_limits
from gateway.wiring.foundation import Foundation
from gateway.wiring.model import ModelParts
from resilience.blame import Blame
from resilience.events import ResilienceEvent
from resilience.retry import RetryPolicy
from resilience.retry_budget import RetryBudget
from resilience.supervisor import EngineLost, EngineRestarted, SupervisorEvent


@dataclass(frozen=True, slots=True)
class GenerationParts:
    """The parts that generate an answer, and the fallback for a failure."""

    dispatcher: Dispatcher
    fallback: FallbackChain
    answers: AnswerCache
    retries_left: Callable[[], Mapping[str, float]]


def make_generation(
    base: Foundation, model: ModelParts, backends: BackendParts, accounts: AccountParts
) -> GenerationParts:
    """Build the layer. Raises ConfigError for the response cache or a limit of ``fallback.limits``."""
    settings, emit, engines = base.settings, base.events.emit, backends.engines
    resilience = make_resilience(
        settings.resilience,
        admission=backends.admission,
        restart_engine=engines.restart,
        emit=emit,
        clock=base.clock,
    )
    base.events.attach(resilience.on_engine_event, EngineLost, EngineRestarted)
    dispatcher = Dispatcher(resilience.retries, resilience.output_guard, model.models.tokenizer, emit)
    answers = make_answers(settings, clock=base.clock, unix_time=base.unix_time, emit=emit)
    fallback = FallbackChain(
        answers=answers,
        limits=make_leg_limits(settings, clock=base.clock, emit=emit, cost=accounts.target_cost),
        admission=backends.admission,
        dispatcher=dispatcher,
        backends=backends.fleet.backends,
        clock=base.clock,
        on_engine=engines.on_engine,
        emit=emit,
    )
    return GenerationParts(dispatcher, fallback, answers, resilience.retries_left)


@dataclass(frozen=True, slots=True)
class Resilience:
    """The dispatcher's retries and output guard; ``retries_left`` returns what is left of each retry budget.

    ``on_engine_event`` takes the supervisor's events: an engine that ran out of memory gets less load.
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
    """Build the retries, the output guard and the reactions to failures.

    A backend that runs out of memory gets its gate of ``admission`` scaled down. ``restart_engine`` takes a
    backend and the reason; it does nothing for a backend without an in-process engine.
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
        lambda: {name: budget.remaining(name, clock()) for name in budget.backends},
        on_engine_event,
    )
