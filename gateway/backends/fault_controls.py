"""The faults that operators have switched on, by backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from gateway.backends.faulty import FaultPlan
from gateway.config.chaos import FaultRule
from gateway.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Chaos:
    """The faults in force and the backends that they may name."""

    plan: FaultPlan
    backends: frozenset[str]

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
