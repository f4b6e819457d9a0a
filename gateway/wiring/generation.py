"""The layer of generation: the guard around every backend, the response cache and the fallback chain."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.generation.dispatcher import Dispatcher
from gateway.generation.fallback import FallbackChain
from gateway.wiring.accounts import AccountParts
from gateway.wiring.backends import BackendParts
from gateway.wiring.cache import Answers, make_answers, make_leg_limits
from gateway.wiring.control import ControlParts
from gateway.wiring.foundation import Foundation
from gateway.wiring.model import ModelParts
from gateway.wiring.resilience import make_resilience
from resilience.leg_limits import LegLimits
from resilience.supervisor import EngineLost, EngineRestarted


@dataclass(frozen=True, slots=True)
class GenerationParts:
    """What generates an answer, and what answers when that fails."""

    dispatcher: Dispatcher
    fallback: FallbackChain
    answers: Answers
    target_limits: LegLimits
    retries_left: Callable[[], Mapping[str, float]]


def make_generation(
    base: Foundation,
    model: ModelParts,
    backends: BackendParts,
    accounts: AccountParts,
    control: ControlParts,
) -> GenerationParts:
    """Build it. Raises ConfigError: the response cache, or a limit of ``fallback.limits``."""
    settings, emit, engines = base.settings, base.events.emit, backends.engines
    resilience = make_resilience(
        settings.resilience,
        admission=control.admission,
        restart_engine=engines.restart,
        emit=emit,
        clock=base.clock,
    )
    base.events.attach(resilience.on_engine_event, EngineLost, EngineRestarted)
    dispatcher = Dispatcher(resilience.retries, resilience.output_guard, model.models.tokenizer, emit)
    answers = make_answers(settings, clock=base.clock, unix_time=base.unix_time, emit=emit)
    limits = make_leg_limits(settings, clock=base.clock, emit=emit, price=accounts.target_price)
    fallback = FallbackChain(
        answers=answers.cache,
        limits=limits,
        admission=control.admission,
        dispatcher=dispatcher,
        backends=backends.fleet.backends,
        clock=base.clock,
        on_engine=engines.on_engine,
        emit=emit,
    )
    return GenerationParts(dispatcher, fallback, answers, limits, resilience.retries_left)
