"""What operators see of the faults made on purpose and do with them; each change is audited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.backends.fault_controls import Chaos
from gateway.config.chaos import FaultRule
from gateway.errors import InvalidRequest
from gateway.state.audit import Audit


@dataclass(frozen=True, slots=True)
class ChaosAdmin:
    """Implements ``gateway.ports.ChaosService``.

    Args:
        chaos: the faults of this process.
        audit: who did what.
    """

    chaos: Chaos
    audit: Audit

    def show(self) -> Mapping[str, object]:
        """The rules in force in this process and what they did."""
        return self.chaos.show()

    async def replace(self, rules: Sequence[FaultRule], *, who: str) -> Mapping[str, object]:
        """Put other rules in force here. Raises InvalidRequest for a backend that is not there."""
        target = _target(rules)
        try:
            self.chaos.replace(rules)
        except InvalidRequest as error:
            await self.audit.record(who, "chaos.replace", target, result=f"refused: {error.code}: {error}")
            raise
        await self.audit.record(who, "chaos.replace", target)
        return self.chaos.show()


def _target(rules: Sequence[FaultRule]) -> str:
    found = Counter(f"{rule.backend}: {rule.kind}" for rule in rules)
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in found.items()) or "none"
