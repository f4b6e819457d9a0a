"""Deliberate faults for admins: show and replace; each change is audited."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from gateway.backends.faulty import FaultPlan
from gateway.config.chaos import MAX_RULES, FaultRule
from gateway.config.section import Section
from gateway.state.audit import Audit


class FaultsRequest(Section):
    """The new rules; an empty list ends all faults."""

    faults: Annotated[tuple[FaultRule, ...], Field(max_length=MAX_RULES)]


class InjectedFault(TypedDict):
    """How often a fault was injected."""

    backend: str
    kind: str
    count: int


class FaultsBody(TypedDict):
    """The faults in force in this process, and how often each was injected."""

    faults: list[dict[str, Any]]
    injected: list[InjectedFault]


@dataclass(frozen=True, slots=True)
class ChaosAdmin:
    """Shows and replaces the faults of this process."""

    plan: FaultPlan
    audit: Audit

    def show(self) -> FaultsBody:
        counts = sorted(self.plan.injected.items())
        return {
            "faults": [rule.model_dump(mode="json", exclude_none=True) for rule in self.plan.rules],
            "injected": [{"backend": name, "kind": kind, "count": count} for (name, kind), count in counts],
        }

    async def replace(self, given: FaultsRequest, *, who: str) -> FaultsBody:
        """Replace the rules. Raises InvalidRequest for a backend that does not exist."""
        async with self.audit.attempt(who, "chaos.replace", _target(given)):
            self.plan.replace(given.faults)
            return self.show()


def _target(given: FaultsRequest) -> str:
    found: Mapping[str, int] = Counter(f"{rule.backend}: {rule.kind}" for rule in given.faults)
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in found.items()) or "none"
