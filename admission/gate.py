"""All decisions about one backend: who is handed on, who waits, who is sent away. Sans I/O.

``controller`` drives it: it offers requests, reports what became of them and what the engine said, and after
each of these calls :meth:`BackendGate.pump` and :meth:`BackendGate.expired`, and acts on what they return.
The simulator drives the same class with its own clock.
"""

from __future__ import annotations

import random

from admission.circuit import CircuitState
from admission.events import SlotOutcome
from admission.fair_queue import Waiting
from admission.gate_state import GateState
from admission.in_flight_work import NOBODY, Ahead
from admission.rates import retry_after_s
from admission.ticket import AdmissionTicket, Hold, Refusal, TicketState
from admission.values import AdmissionLimits, BackendLoad, Demand, Reason

__all__ = ["AdmissionTicket", "BackendGate", "Hold", "Refusal", "TicketState"]

# Output counts twice in a tenant's share: a token of it holds the engine for a whole step (as VTC weighs it).
OUTPUT_WEIGHT = 2


class BackendGate(GateState):
    """One backend's gate.

    Args:
        limits: the thresholds of requests that bring none of their own.
        random: source of the jitter in ``retry_after_s``.
    """

    def __init__(self, limits: AdmissionLimits, *, random: random.Random) -> None:
        super().__init__(limits)
        self._random = random
        self._numbers = 0
        self._pushed: list[AdmissionTicket] = []

    # What the backend says

    def told(self, load: BackendLoad | None, now: float) -> None:
        """The engine's word after a step; ``None`` changes nothing but is no sign of life either."""
        if load is None:
            return
        self._flight.told(load, now)
        if self._line:
            self._flight.memory.refresh(now)  # here once a step, not in the decisions after it

    def scale(self, factor: float) -> None:
        """Use only so much of the sequences and blocks, until told otherwise; above 0, at most 1."""
        self._flight.scale = factor

    # A request's way

    def offer(self, demand: Demand, now: float) -> AdmissionTicket | Refusal:
        """Take a request into the line, or say why not.

        Refusals, in this order, so that the first reason that holds is the one told:

        1. ``circuit_open``: too many answers of this backend failed lately.
        2. ``low_priority_shed`` or ``queue_full``: the ladder has climbed that far.
        3. ``token_budget_exceeded``: the prompt is longer than this backend should take.
        4. ``memory_pressure``: the pool is in its out-of-memory zone.
        5. ``queue_full``: no room for one more, and nobody of a lower class waits who could make room.
        6. ``wait_exceeded`` (``memory_pressure`` when memory is what it would wait for): the estimated wait
           passes the wait budget, or the first token would come later than it is due.

        One of a lower class that makes room is found with :meth:`pushed_out`.
        """
        limits = demand.limits or self.limits
        factor = limits.priority_factor if demand.priority > 0 else 1.0
        flight = self._flight
        flight.asked(demand.priority, now)
        uncached, due = flight.experience.uncached(demand), demand.due(limits)
        waiting = self._waiting_in_all
        rung = self._ladders.of(limits.rungs).at(waiting // flight.signals.workers)
        max_tokens = demand.max_output_tokens
        if rung.max_tokens is not None:
            max_tokens = min(max_tokens, rung.max_tokens * demand.sequences)
        wait_s, first_s = self._estimates(demand, uncached, now)

        reason: Reason | None = None
        if not self.circuit.admits(now):
            reason = Reason.CIRCUIT_OPEN
        elif rung.shed_low and demand.priority < 0:
            reason = Reason.LOW_PRIORITY_SHED
        elif rung.shed_all:
            reason = Reason.QUEUE_FULL
        elif demand.input_tokens > limits.max_input_tokens:
            reason = Reason.TOKEN_BUDGET_EXCEEDED
        elif flight.out_of_memory(demand.priority, limits, now):
            reason = Reason.MEMORY_PRESSURE
        elif self._full(demand, limits, factor, waiting, now) and not self._make_room(demand, now):
            reason = Reason.QUEUE_FULL
        elif wait_s >= limits.max_wait_s * factor or flight.misses(due, first_s, now):
            reason = Reason.MEMORY_PRESSURE if self.hold is Hold.MEMORY else Reason.WAIT_EXCEEDED
        if reason is not None:
            return self._refusal(reason, wait_s, now)

        self._numbers += 1
        leave_at = now + limits.max_wait_s * factor
        if due is not None:
            # By then even an empty engine would be too slow; what is too late before that, `pump` finds.
            leave_at = min(leave_at, due - flight.alone_s(uncached, now))
        expected = flight.experience.expect(demand, max_tokens)
        item = Waiting(
            number=self._numbers,
            tenant=demand.tenant,
            rank=demand.priority,
            cost=uncached + OUTPUT_WEIGHT * expected,
            tokens=uncached,
            size_bytes=demand.size_bytes,
            arrived_at=now,
            leave_at=leave_at,
            deadline=due,
        )
        ticket = AdmissionTicket(demand, item, demand.kind, uncached, max_tokens, expected, wait_s, first_s)
        self._tickets[item.number] = ticket
        self._line.join(item)
        return ticket

    def pushed_out(self) -> list[AdmissionTicket]:
        """Those who had to make room, or whose turn came too late, since this was last asked."""
        out, self._pushed = self._pushed, []
        return out

    def pump(self, now: float) -> list[AdmissionTicket]:
        """Hand on as many as the backend should have now, in the order of the line.

        One whose first token would come too late is not begun, and while the circuit is open none is:
        :meth:`pushed_out` tells them.
        """
        handed_on: list[AdmissionTicket] = []
        if not self._line:
            self._hold = None
            return handed_on
        if self.circuit.state(now) is CircuitState.OPEN:
            self._all_away(Reason.CIRCUIT_OPEN, now)
            return handed_on
        self._line.age(now)
        while (item := self._line.peek()) is not None:
            ticket = self._tickets[item.number]
            self._hold = self._flight.holds(ticket, now)
            if self._hold is not None:
                break
            del self._tickets[item.number]
            if self._flight.too_late(ticket, now):
                self._line.leave(item)
                self._gone(ticket, Reason.WAIT_EXCEEDED, now)
                self._pushed.append(ticket)
                continue
            self._line.serve(item)
            self._flight.add(ticket, now)
            handed_on.append(ticket)
        return handed_on

    def expired(self, now: float) -> list[AdmissionTicket]:
        """Those whose time has come: they leave at once, with the reason that held them."""
        reason = Reason.MEMORY_PRESSURE if self._hold is Hold.MEMORY else Reason.WAIT_EXCEEDED
        out = []
        for item in self._line.expired(now):
            ticket = self._tickets.pop(item.number)
            by_deadline = item.leave_at < item.arrived_at + self._wait_of(ticket)
            self._gone(ticket, Reason.WAIT_EXCEEDED if by_deadline else reason, now)
            out.append(ticket)
        return out

    def next_change(self) -> float | None:
        """When the clock alone will change something."""
        return self._line.next_change()

    def first_token(self, ticket: AdmissionTicket, now: float, cached_tokens: int | None) -> None:
        """The first piece of its answer is there."""
        if ticket.state is not TicketState.HANDED_ON or ticket.first_token_at is not None:
            return
        self._flight.first_token(ticket, now, cached_tokens)

    def release(
        self, ticket: AdmissionTicket, outcome: SlotOutcome, now: float, *, output_tokens: int
    ) -> None:
        """Its work has ended, or it left the line by itself; a second word about it changes nothing."""
        if ticket.state is TicketState.WAITING:
            del self._tickets[ticket.number]
            self._line.leave(ticket.waiting)
            ticket.state = TicketState.GONE
            return
        if ticket.state is not TicketState.HANDED_ON:
            return
        self._flight.remove(ticket, outcome, now, output_tokens=output_tokens)
        if outcome is not SlotOutcome.IGNORED:
            self.circuit.saw(outcome is SlotOutcome.DROPPED, now)

    # Parts of the decisions

    def _estimates(self, demand: Demand, uncached: int, now: float) -> tuple[float, float]:
        """Seconds until it would be handed on, and to its first token."""
        ahead, by_memory = NOBODY, False
        if self._tickets:
            requests = self._line.ahead_of(demand.tenant, demand.priority)
            if requests:
                ahead = Ahead(requests, self._line.tokens * requests // len(self._tickets))
            by_memory = self._hold is Hold.MEMORY
        return self._flight.estimates(demand, uncached, ahead, now, by_memory=by_memory)

    def _full(self, demand: Demand, limits: AdmissionLimits, factor: float, waiting: int, now: float) -> bool:
        workers = self._flight.signals.workers
        if not waiting:
            flight = self._flight
            return limits.max_queue == 0 and flight.sequences + flight.foreign >= flight.capacity(now)
        return (
            waiting >= limits.max_queue * factor * workers
            or self._line.tokens + demand.input_tokens > limits.max_queue_tokens * workers
            or self._line.size_bytes + demand.size_bytes > limits.max_queue_bytes
        )

    def _make_room(self, demand: Demand, now: float) -> bool:
        """Push out the one that is missed least, if somebody of a lower class waits."""
        least = self._line.least()
        if least is None or least.rank >= demand.priority:
            return False
        ticket = self._tickets.pop(least.number)
        self._line.leave(least)
        self._gone(ticket, Reason.LOW_PRIORITY_SHED, now)
        self._pushed.append(ticket)
        return True

    def _all_away(self, reason: Reason, now: float) -> None:
        """Nobody waits any longer; :meth:`pushed_out` tells them."""
        for ticket in self._tickets.values():
            self._line.leave(ticket.waiting)
            self._gone(ticket, reason, now)
            self._pushed.append(ticket)
        self._tickets.clear()
        self._hold = None

    def _gone(self, ticket: AdmissionTicket, reason: Reason, now: float) -> None:
        ticket.state = TicketState.GONE
        # Whoever asks again joins the line as it is now.
        again_s, _ = self._estimates(ticket.demand, ticket.uncached, now)
        wait_s = max(again_s, now - ticket.waiting.arrived_at)
        ticket.refusal = self._refusal(reason, wait_s, now, queued=True)

    def _refusal(self, reason: Reason, wait_s: float, now: float, *, queued: bool = False) -> Refusal:
        turnover_s = self._flight.hold_s(now) / max(1, self.limit.value)
        again_s = retry_after_s(wait_s, turnover_s, self._random.random())
        if reason is Reason.CIRCUIT_OPEN:
            again_s = max(again_s, self.circuit.retry_after_s(now))
        return Refusal(reason, wait_s, again_s, queued)

    def _wait_of(self, ticket: AdmissionTicket) -> float:
        limits = ticket.demand.limits or self.limits
        return limits.max_wait_s * (limits.priority_factor if ticket.demand.priority > 0 else 1.0)
