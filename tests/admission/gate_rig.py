"""A gate with a load and a clock that the test sets."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from msgspec import structs

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.rates import Rates
from admission.ticket import AdmissionTicket, Refusal, TicketState
from admission.values import AdmissionLimits, BackendLoad, Demand, Reason

IDLE = BackendLoad(running=0, waiting=0, kv_usage=0.0, total_blocks=1000, block_size=16, max_running=4)
DEMAND = Demand(
    backend="local", tenant="acme", priority=0, input_tokens=100, max_output_tokens=50, arrived_at=0.0
)


# The product's defaults follow the engine's figures; these limits are fixed.
PLAIN = AdmissionLimits(max_queue=100, max_wait_s=2.0, tpot_slo_s=None, max_prefill_s=math.inf)


def first_token_s(rates: Rates, tokens_ahead: int) -> float:
    """Expected seconds from hand-over to the first token."""
    return rates.step_s + rates.s_per_token * tokens_ahead


def plain(**changes: object) -> AdmissionLimits:
    """Return ``PLAIN`` with changes."""
    return replace(PLAIN, **changes)  # type: ignore[arg-type]


def ask(**changes: object) -> Demand:
    """Return ``DEMAND`` with changes."""
    return structs.replace(DEMAND, **changes)  # type: ignore[arg-type]


@dataclass
class GateRig:
    """Offers to a gate, pumps it and releases tickets, at a time that the test sets."""

    limits: AdmissionLimits = PLAIN
    load: BackendLoad | None = IDLE
    now: float = 0.0
    hosted: bool = False

    def __post_init__(self) -> None:
        self.gate = BackendGate(self.limits, random=random.Random(7), hosted=self.hosted)
        self.tell(self.load)

    def tell(self, load: BackendLoad | None) -> None:
        self.gate.report(load, self.now)

    def offer(self, demand: Demand = DEMAND) -> AdmissionTicket | Refusal:
        return self.gate.offer(demand, self.now)

    def enter(self, demand: Demand = DEMAND) -> AdmissionTicket:
        """Offer a demand, which the gate must not refuse, and pump the gate."""
        offered = self.offer(demand)
        assert isinstance(offered, AdmissionTicket), offered
        self.gate.pump(self.now)
        return offered

    def reason(self, demand: Demand = DEMAND) -> Reason | None:
        """Return why the gate refuses the demand at once; None when the gate takes it."""
        offered = self.offer(demand)
        if isinstance(offered, Refusal):
            return offered.reason
        self.gate.release(offered, SlotOutcome.IGNORED, self.now, output_tokens=0)
        return None

    def end(
        self, ticket: AdmissionTicket, outcome: SlotOutcome = SlotOutcome.SUCCEEDED, *, tokens: int = 50
    ) -> list[AdmissionTicket]:
        """Release the ticket; return the tickets that are handed on next."""
        self.gate.release(ticket, outcome, self.now, output_tokens=tokens)
        return self.gate.pump(self.now)

    def serve(self, seconds: float, demand: Demand = DEMAND, *, tokens: int = 50) -> None:
        """Run one request from its offer to its end, which comes ``seconds`` later."""
        ticket = self.enter(demand)
        assert ticket.state is TicketState.HANDED_ON
        self.gate.first_token(ticket, self.now, 0)
        self.now += seconds
        self.end(ticket, tokens=tokens)
