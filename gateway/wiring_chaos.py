"""Construction of the faults made on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from gateway.backends.faulty import FaultPlan, faulty
from gateway.backends.port import Backend
from gateway.config import ConfigError
from gateway.config_chaos import ChaosSection, FaultRule
from gateway.errors import InvalidRequest
from observability.chaos_metrics import ChaosCollector


@dataclass(frozen=True, slots=True)
class Chaos:
    """The faults in force, for operators: what ``/admin/chaos`` shows and changes."""

    plan: FaultPlan
    backends: frozenset[str]

    def show(self) -> Mapping[str, object]:
        """The rules in force and what they did, as JSON values."""
        injected = [
            {"backend": backend, "kind": kind, "count": count}
            for (backend, kind), count in sorted(self.plan.injected.items())
        ]
        rules = [rule.model_dump(mode="json", exclude_none=True) for rule in self.plan.rules]
        return {"faults": rules, "injected": injected}

    def replace(self, rules: Sequence[FaultRule]) -> None:
        """Put other rules in force. Raises InvalidRequest for a backend that is not there."""
        for number, rule in enumerate(rules):
            if rule.backend not in self.backends:
                raise InvalidRequest(
                    f"there is no backend {rule.backend!r}; allowed: {', '.join(sorted(self.backends))}",
                    param=f"faults.{number}.backend",
                )
        self.plan.replace(rules)
        structlog.get_logger("gateway").warning("other faults are in force", rules=len(rules))


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
