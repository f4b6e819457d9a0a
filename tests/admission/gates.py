"""A gate with its surroundings in hand."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from msgspec import structs

from admission.events import SlotOutcome
from admission.gate import BackendGate, Refusal, TicketState
from admission.ticket import AdmissionTicket
from admission.values import AdmissionLimits, BackendLoad, Demand, Reason

IDLE = BackendLoad(running=0, waiting=0, kv_usage=0.0, total_blocks=1000, block_size=16, max_running=4)
DEMAND = Demand(
    backend="local", tenant="acme", priority=0, input_tokens=100, max_output_tokens=50, arrived_at=0.0
)


# The defaults follow the engine; these stay where they are.
PLAIN = AdmissionLimits(max_queue=100, max_wait_s=2.0, tpot_slo_s=None, max_prefill_s=math.inf)


def plain(**changes: object) -> AdmissionLimits:
    """Limits that differ from the plain ones."""
    return replace(PLAIN, **changes)  # type: ignore[arg-type]


def ask(**changes: object) -> Demand:
    """A demand that differs from the usual one."""
    return structs.replace(DEMAND, **changes)  # type: ignore[arg-type]


@dataclass
class Door:
    """Offers, looks and releases at a time that the test moves."""

    limits: AdmissionLimits = PLAIN
    load: BackendLoad | None = IDLE
    now: float = 0.0

    def __post_init__(self) -> None:
        self.gate = BackendGate(self.limits, random=random.Random(7))
        self.tell(self.load)

    def tell(self, load: BackendLoad | None) -> None:
        self.gate.report(load, self.now)

    def offer(self, demand: Demand = DEMAND) -> AdmissionTicket | Refusal:
        return self.gate.offer(demand, self.now)

    def enter(self, demand: Demand = DEMAND) -> AdmissionTicket:
        """Offer and look; it must have been taken into the line."""
        offered = self.offer(demand)
        assert isinstance(offered, AdmissionTicket), offered
        self.gate.pump(self.now)
        return offered

    def reason(self, demand: Demand = DEMAND) -> Reason | None:
        """Why it is sent away at once, if it is."""
        offered = self.offer(demand)
        if isinstance(offered, Refusal):
            return offered.reason
        self.gate.release(offered, SlotOutcome.IGNORED, self.now, output_tokens=0)
        return None

    def end(
        self, ticket: AdmissionTicket, outcome: SlotOutcome = SlotOutcome.SUCCEEDED, *, tokens: int = 50
    ) -> list[AdmissionTicket]:
        """Its work ends; who goes on after it."""
        self.gate.release(ticket, outcome, self.now, output_tokens=tokens)
        return self.gate.pump(self.now)

    def serve(self, seconds: float, demand: Demand = DEMAND, *, tokens: int = 50) -> None:
        """One request from its offer to its end."""
        ticket = self.enter(demand)
        assert ticket.state is TicketState.HANDED_ON
        self.gate.first_token(ticket, self.now, 0)
        self.now += seconds
        self.end(ticket, tokens=tokens)
