"""A request handed on past an empty queue leaves the gate in the same state as one queued and pumped."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.ticket import AdmissionTicket, Refusal, TicketState
from admission.values import AdmissionLimits, BackendLoad, Demand

LIMITS = AdmissionLimits(max_queue=4, max_in_flight=6)


@dataclass
class LoggedGate:
    """A gate, called as ``AdmissionQueue`` calls it; the log holds its decisions."""

    at_once: bool
    gate: BackendGate = field(default_factory=lambda: BackendGate(LIMITS, random=random.Random(1)))
    log: list[object] = field(default_factory=list)
    running: list[AdmissionTicket] = field(default_factory=list)

    def offer(self, demand: Demand, now: float) -> None:
        offered = self.gate.offer(demand, now, at_once=self.at_once)
        if isinstance(offered, Refusal):
            self.log.append(offered)
        elif offered.state is TicketState.HANDED_ON:
            self._started(offered)
        self.settle(now)

    def settle(self, now: float) -> None:
        self.log += [(one.number, one.refusal) for one in self.gate.displaced()]
        self.log += [(one.number, one.refusal) for one in self.gate.expired(now)]
        for ticket in self.gate.pump(now):
            self._started(ticket)
        self.log += [(one.number, one.refusal) for one in self.gate.displaced()]
        self.log.append((self.gate.in_flight, self.gate.queued, self.gate.hold))

    def _started(self, ticket: AdmissionTicket) -> None:
        self.running.append(ticket)
        self.log.append(("started", ticket.demand.tenant, ticket.number, ticket.alone, ticket.beyond))

    def end(self, now: float) -> None:
        if self.running:
            ticket = self.running.pop(0)
            self.gate.first_token(ticket, now, None)
            self.gate.release(ticket, SlotOutcome.SUCCEEDED, now + 0.01, output_tokens=40)
            self.settle(now + 0.01)

    def report(self, running: int, now: float) -> None:
        blocks = BackendLoad(running=running, waiting=0, kv_usage=min(0.9, running / 8), total_blocks=64)
        self.gate.report(blocks, now)
        self.settle(now)


STEP = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 400)),
    st.tuples(st.just("end")),
    st.tuples(st.just("report"), st.integers(0, 8)),
)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), STEP), max_size=40))
def test_handing_on_at_once_decides_as_queueing_does(steps: list[tuple[float, tuple[object, ...]]]) -> None:
    now = 0.0
    gates = LoggedGate(at_once=True), LoggedGate(at_once=False)
    for wait_s, step in steps:
        now += wait_s
        for driven in gates:
            match step:
                case ("offer", str(tenant), int(priority), int(tokens)):
                    demand = Demand(
                        backend="b",
                        tenant=tenant,
                        priority=priority,
                        input_tokens=tokens,
                        max_output_tokens=64,
                        arrived_at=now,
                        kind=("route", None),
                        produced=lambda: 40,
                    )
                    driven.offer(demand, now)
                case ("end",):
                    driven.end(now)
                case ("report", int(running)):
                    driven.report(running, now)
        assert gates[0].log == gates[1].log
