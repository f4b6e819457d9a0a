"""Construction of the faults made on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping

import structlog

from gateway.backends.fault_controls import Chaos
from gateway.backends.faulty import FaultPlan, faulty
from gateway.backends.port import Backend
from gateway.config.chaos import ChaosSection
from gateway.config.errors import ConfigError
from gateway.errors import InvalidRequest
from observability.chaos_metrics import ChaosCollector


def make_chaos(
    section: ChaosSection, backends: Mapping[str, Backend]
) -> tuple[Mapping[str, Backend], Chaos | None]:
    """The backends as the fleet shall have them, wrapped only when faults are wanted.

    Raises:
        ConfigError: a rule names a backend that is not there.
    """
    if not section.enabled:
        return backends, None
    structlog.get_logger("gateway").warning(
        "FAULTS ARE MADE ON PURPOSE: chaos.enabled is true; never serve real callers like this"
    )
    plan = FaultPlan((), random.Random(section.seed))
    chaos = Chaos(plan, frozenset(backends))
    try:
        chaos.replace(section.faults)
    except InvalidRequest as error:
        raise ConfigError(f"chaos.{error.param}: {error.message}") from None
    return {name: faulty(backend, plan) for name, backend in backends.items()}, chaos


def chaos_collector(chaos: Chaos) -> ChaosCollector:
    """Reads the faults made."""
    return ChaosCollector(lambda: chaos.plan.injected)
