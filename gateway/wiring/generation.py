"""The layer of generation: the guard around every backend, the response cache and the fallback chain."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from resilience.retry import RetryPolicy
from resilience.retry_budget import RetryBudget
from resilience.supervisor import EngineLost, EngineRestarted


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
    settings, emit, engines, clock = base.settings, base.events.emit, backends.engines, base.clock
    section, admission = settings.resilience, backends.admission
    remediation = Remediation(
        gate_of=admission.gate_name, scale=admission.scale, restart=engines.restart, clock=clock, emit=emit
    )
    base.events.attach(remediation.on_engine, EngineLost, EngineRestarted)
    retries = make_retries(section, remediation, clock)
    output_guard = OutputGuard(section.degenerate_action, section.limits(), emit, Blame(clock))
    dispatcher = Dispatcher(retries, output_guard, model.models.tokenizer, emit)
    answers = make_answers(settings, clock=clock, unix_time=base.unix_time, emit=emit)
    fallback = FallbackChain(
        answers=answers,
        limits=make_leg_limits(settings, clock=clock, emit=emit, cost=accounts.target_cost),
        admission=admission,
        dispatcher=dispatcher,
        backends=backends.fleet.backends,
        clock=clock,
        on_engine=engines.on_engine,
        emit=emit,
    )
    budget = retries.policy.budget
    return GenerationParts(dispatcher, fallback, answers, lambda: budget.left(clock()))


def make_retries(
    section: ResilienceSection, remediation: Remediation, clock: Callable[[], float]
) -> RetryLoop:
    budget = RetryBudget(
        share=section.retry_share, per_second=section.retry_per_second, most=section.retry_most
    )
    policy = RetryPolicy(budget, random.Random(), remediation.on_event)
    return RetryLoop(policy, clock=clock, sleep=asyncio.sleep, emit=remediation.on_event)
