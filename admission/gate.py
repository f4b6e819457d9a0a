"""All admission decisions about one backend: which requests are handed on, wait or are refused. Sans I/O.

``queue`` and the simulator drive it: they offer requests, report their ends and the engine's load, call
:meth:`BackendGate.pump` and :meth:`BackendGate.expired` after each of these, and act on what they return.
"""

import random
from dataclasses import replace
from functools import lru_cache

from admission.circuit import Circuit, CircuitState
from admission.events import DROPPED, IGNORED, SlotOutcome
from admission.fair_queue import FairQueue
from admission.forecast import ReservedTokens
from admission.in_flight_work import InFlightWork, Room
from admission.ladder import Ladder, Rung
from admission.rates import retry_after_s
from admission.ticket import GONE, HANDED_ON, WAITING, AdmissionTicket, Hold, Refusal
from admission.values import AdmissionLimits, BackendLoad, Demand, Reason

# Output counts twice in a tenant's share: each token occupies the engine for a whole step (as VTC weighs it).
OUTPUT_WEIGHT = 2
MAX_LADDERS = 64  # stored ladders of routes; the least recently used is evicted with its level


class BackendGate:
    """One backend's gate: the breaker, the queue, the overload levels and the work in flight.

    ``limits`` apply to requests without their own; ``random`` gives the jitter in ``retry_after_s``;
    ``hosted`` is that of :class:`InFlightWork`.
    """

    def __init__(self, limits: AdmissionLimits, *, random: random.Random, hosted: bool = False) -> None:
        self.limits = limits
        self.queue: FairQueue[AdmissionTicket] = FairQueue(aging_s=limits.aging_s)
        self.tickets = self.queue.waiting
        self._hold: Hold | None = None
        self.work = InFlightWork(limits, hosted=hosted)
        self._ladder, self._ladders = Ladder(limits.rungs), lru_cache(MAX_LADDERS)(Ladder)
        self.circuit = Circuit()
        self.first_token = self.work.first_token
        self.rates = self.work.estimator.rates
        self.limit = self.work.estimator.limit
        self.pace = self.work.estimator.pace
        self.forecast = self.work.memory.forecast
        self._random = random
        self._numbers = 0
        self._displaced: list[AdmissionTicket] = []

    # The backend's reports

    def report(self, load: BackendLoad | None, now: float) -> None:
        """Take the engine's load after a step; ``None`` changes nothing and is no sign of life."""
        if load is None:
            return
        self.work.report(load, now)
        if self.tickets:
            self.work.memory.refresh(now)  # here once a step, not in the decisions after it

    # The life of a request

    def offer(self, demand: Demand, now: float, *, at_once: bool = False) -> AdmissionTicket | Refusal:
        """Queue a request, or refuse it (:meth:`_reason_to_refuse`); with ``at_once`` hand it on directly, as
        :meth:`pump` would, if no request waits and nothing holds this one."""
        limits = demand.limits or self.limits
        factor = limits.priority_factor if demand.priority > 0 else 1.0
        work = self.work
        work.arrived(demand, now)
        uncached = work.estimator.uncached(demand)
        alone_s = work.estimator.first_token_s(uncached)
        longest_s, due = work.estimator.longest_wait(demand, limits, alone_s)
        longest_s *= factor
        waiting = len(self.tickets) + work.waiting
        rungs = limits.rungs
        ladder = self._ladder if rungs is self.limits.rungs else self._ladder_of(rungs)
        rung = ladder.at(waiting // work.signals.workers)
        max_tokens = demand.max_output_tokens
        if rung.max_tokens is not None:
            max_tokens = min(max_tokens, rung.max_tokens * demand.sequences)
        room = work.room(demand, demand.priority, now)
        wait_s, first_s = self._estimates(demand, uncached, room)
        late = wait_s >= longest_s or (
            due is not None and work.estimator.misses(due, first_s, now, busy=bool(work.tickets))
        )
        crowded = waiting > 0 or not limits.max_queue
        full = crowded and self._full(demand, limits, factor, waiting, now)
        least = self._lower(demand) if full else None

        reason = self._reason_to_refuse(
            demand, limits, rung, room, now, full=full and least is None, late=late
        )
        if reason is not None:
            refusal = self._refusal(reason, wait_s, now)
            too_slow = reason is Reason.WAIT_EXCEEDED and wait_s < longest_s
            return replace(refusal, first_token_s=first_s) if too_slow else refusal
        if least is not None:
            self._displace(least, Reason.LOW_PRIORITY_SHED, now)

        self._numbers += 1
        leave_at = now + longest_s
        if due is not None:
            # After that even an idle engine would be too slow; `pump` refuses requests that are late earlier.
            known = not work.estimator.forgotten(now, busy=bool(work.tickets))
            leave_at = min(leave_at, due - alone_s if known else due)
        expected = work.estimator.expect(demand, max_tokens)
        ticket = AdmissionTicket(
            number=self._numbers,
            tenant=demand.tenant,
            rank=demand.priority,
            cost=uncached + OUTPUT_WEIGHT * expected,
            uncached=uncached,
            size_bytes=demand.size_bytes,
            arrived_at=now,
            leave_at=leave_at,
            deadline=due,
            demand=demand,
            reserved=ReservedTokens(uncached, expected, width=demand.sequences),
            max_tokens=max_tokens,
            max_wait_s=longest_s,
            estimated_wait_s=wait_s,
            estimated_first_token_s=first_s,
        )
        # Not in the call: with 16 keywords it would build a dict.
        ticket.shrunk = max_tokens < demand.max_output_tokens
        if at_once and not self.tickets and not self._displaced:
            self._hold = work.holds(ticket, room, now)
            # The check above found it in time, by the same estimates.
            if self._hold is None:
                self.queue.count_served_directly(ticket)
                work.add(ticket, now, room.ahead)
                return ticket
        self.queue.join(ticket)
        return ticket

    def displaced(self) -> list[AdmissionTicket]:
        """Take the queued requests refused since the last call (displaced, too late, circuit open)."""
        out, self._displaced = self._displaced, []
        return out

    def pump(self, now: float) -> list[AdmissionTicket]:
        """Hand on as many requests as the backend should have now, in the order of the queue.

        Requests that are too late, and all while the circuit is open, are refused: see :meth:`displaced`.
        """
        handed_on: list[AdmissionTicket] = []
        if not self.tickets:
            self._hold = None
            return handed_on
        if self.circuit.state(now) is CircuitState.OPEN:
            for waiting in list(self.tickets.values()):
                self._displace(waiting, Reason.CIRCUIT_OPEN, now)
            self._hold = None
            return handed_on
        self.queue.age(now)
        while (ticket := self.queue.peek()) is not None:
            room = self.work.room(ticket.demand, ticket.rank, now)
            self._hold = self.work.holds(ticket, room, now)
            if self._hold is not None:
                break
            if self.work.too_late(ticket, room, now):
                self._displace(ticket, Reason.WAIT_EXCEEDED, now)
                continue
            self.queue.serve(ticket)
            self.work.add(ticket, now, room.ahead)
            handed_on.append(ticket)
        return handed_on

    def expired(self, now: float) -> list[AdmissionTicket]:
        """Refuse and return requests past their deadline, or their wait budget (reason: what held them)."""
        reason = Reason.MEMORY_PRESSURE if self._hold is Hold.MEMORY else Reason.WAIT_EXCEEDED
        expired = self.queue.expired(now)
        for ticket in expired:
            by_deadline = ticket.leave_at < ticket.arrived_at + ticket.max_wait_s
            self._mark_refused(ticket, Reason.WAIT_EXCEEDED if by_deadline else reason, now)
        return expired

    def release(
        self, ticket: AdmissionTicket, outcome: SlotOutcome, now: float, *, output_tokens: int
    ) -> None:
        """Release a request whose work has ended, or which left the queue; a second call changes nothing."""
        if ticket.state is WAITING:
            self.queue.leave(ticket)
            ticket.state = GONE
            return
        if ticket.state is not HANDED_ON:
            return
        self.work.remove(ticket, outcome, now, output_tokens=output_tokens)
        if outcome is not IGNORED:
            self.circuit.record(outcome is DROPPED, now)

    # Parts of the decisions

    def _reason_to_refuse(
        self,
        demand: Demand,
        limits: AdmissionLimits,
        rung: Rung,
        room: Room,
        now: float,
        *,
        full: bool,
        late: bool,
    ) -> Reason | None:
        """The first of these that applies to a new request:

        1. ``circuit_open``: too many answers of this backend failed lately.
        2. ``low_priority_shed`` or ``queue_full``: the queue has reached that overload level.
        3. ``token_budget_exceeded``: the prompt is longer than the limit.
        4. ``memory_pressure``: the pool is in its out-of-memory zone.
        5. ``queue_full``: the queue is full, and no request of a lower class can be displaced.
        6. ``wait_exceeded`` (``memory_pressure`` when it would wait for memory): the estimated wait passes
           the wait budget, or the first token would come later than it is due.
        """
        if not self.circuit.admits(now):
            return Reason.CIRCUIT_OPEN
        if rung.shed_low and demand.priority < 0:
            return Reason.LOW_PRIORITY_SHED
        if rung.shed_all:
            return Reason.QUEUE_FULL
        if limits.max_input_tokens is not None and demand.input_tokens > limits.max_input_tokens:
            return Reason.TOKEN_BUDGET_EXCEEDED
        if self.work.out_of_memory(demand.priority, limits, room.used):
            return Reason.MEMORY_PRESSURE
        if full:
            return Reason.QUEUE_FULL
        if late:
            return Reason.MEMORY_PRESSURE if self.hold is Hold.MEMORY else Reason.WAIT_EXCEEDED
        return None

    def _estimates(self, demand: Demand, uncached: int, room: Room) -> tuple[float, float]:
        """Expected seconds until the request would be handed on (slot, prefill ahead), and until its first
        token."""
        work, estimator = self.work, self.work.estimator
        rates, places = estimator.rates, room.places
        tokens_ahead, missing = room.ahead, demand.sequences + work.waiting
        if self.tickets:
            requests = self.queue.ahead_of(demand.tenant, demand.priority)
            if not work.hosted:
                tokens_ahead += self.queue.tokens * requests // len(self.tickets) // work.signals.workers
            missing += requests
            if self._hold is Hold.MEMORY and work.sequences:
                places = work.sequences  # memory bounds the batch, so its size stays what it is now
        missing -= free if (free := places - work.sequences - work.foreign) > 0 else 0
        slot_s = missing * rates.hold_s.value / places if missing > 0 else 0.0
        beyond = 0 if room.bound is None else tokens_ahead - room.bound
        prefill_s = beyond * rates.s_per_token if beyond > 0 else 0.0
        since = work.busy_since if work.tickets else None
        first_s = estimator.first_token_s(tokens_ahead + uncached, since)
        if slot_s > 0.0:
            first_s = max(first_s, slot_s + estimator.first_token_s(uncached, since))
        return slot_s if slot_s > prefill_s else prefill_s, first_s

    def _ladder_of(self, rungs: tuple[Rung, ...]) -> Ladder:
        """The ladder with these rungs: the gate's own, or that of routes with rungs of their own."""
        own = self.limits.rungs
        return self._ladder if rungs is own or rungs == own else self._ladders(rungs)

    def _full(self, demand: Demand, limits: AdmissionLimits, factor: float, waiting: int, now: float) -> bool:
        workers = self.work.signals.workers
        if not waiting:
            work = self.work
            return limits.max_queue == 0 and work.sequences + work.foreign >= work.capacity(now)
        return (
            waiting >= limits.max_queue * factor * workers
            or self.queue.tokens + demand.input_tokens > limits.max_queue_tokens * workers
            or self.queue.size_bytes + demand.size_bytes > limits.max_queue_bytes
        )

    def _lower(self, demand: Demand) -> AdmissionTicket | None:
        """The waiting request of a lower class to displace, if there is one."""
        least = self.queue.least()
        return None if least is None or least.rank >= demand.priority else least

    def _displace(self, ticket: AdmissionTicket, reason: Reason, now: float) -> None:
        self.queue.leave(ticket)
        self._mark_refused(ticket, reason, now)
        self._displaced.append(ticket)

    def _mark_refused(self, ticket: AdmissionTicket, reason: Reason, now: float) -> None:
        ticket.state = GONE
        # A new attempt would join the queue as it is now.
        room = self.work.room(ticket.demand, ticket.demand.priority, now)
        again_s, _ = self._estimates(ticket.demand, ticket.uncached, room)
        wait_s = max(again_s, now - ticket.arrived_at)
        ticket.refusal = self._refusal(reason, wait_s, now, queued=True)

    def _refusal(self, reason: Reason, wait_s: float, now: float, *, queued: bool = False) -> Refusal:
        turnover_s = self.work.hold_s(now) / max(1, self.limit.value)
        closed_in_s = self.circuit.retry_after_s(now) if reason is Reason.CIRCUIT_OPEN else 0.0
        again_s = retry_after_s(max(wait_s, closed_in_s), turnover_s, self._random.random())
        return Refusal(reason, wait_s, again_s, queued)

    # Figures, for display and tests

    def rung(self, rungs: tuple[Rung, ...] | None = None) -> tuple[int, Rung]:
        """The number and rung of a new request's overload level, by ``rungs`` or else the gate's own."""
        ladder = self._ladder if rungs is None else self._ladder_of(rungs)
        climbed = ladder.climbed(self.depth)
        return climbed, ladder.rung(climbed)

    @property
    def in_flight(self) -> int:
        return len(self.work.tickets)

    @property
    def queued(self) -> int:
        return len(self.tickets)

    @property
    def hold(self) -> Hold | None:
        """What held the next request at the last :meth:`pump`; ``None`` with an empty queue."""
        return self._hold if self.tickets else None

    @property
    def depth(self) -> int:
        """Waiting requests for each of the backend's engines, rounded down."""
        return (len(self.tickets) + self.work.waiting) // self.work.signals.workers
