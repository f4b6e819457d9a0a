"""All decisions about one backend: who is handed on, who waits, who is sent away. Sans I/O.

``controller`` drives it: it offers requests, reports what became of them and what the engine said, and after
each of these calls :meth:`Gate.pump` and :meth:`Gate.expired`, and acts on what they return. The simulator
drives the same class with its own clock.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from admission.circuit import Circuit, CircuitState
from admission.events import Outcome
from admission.experience import Experience
from admission.ladder import Ladder, Ladders
from admission.line import Line, Waiting
from admission.memory import Memory
from admission.prefill import PrefillBacklog
from admission.rates import retry_after_s
from admission.signals import Signals
from admission.ticket import Hold, Refusal, Ticket, TicketState
from admission.values import Demand, Limits, Load, Reason

__all__ = ["Gate", "Hold", "Refusal", "Ticket", "TicketState"]

# Output counts twice in a tenant's share: a token of it holds the engine for a whole step (as VTC weighs it).
OUTPUT_WEIGHT = 2


class Gate:
    """One backend's gate.

    Args:
        limits: the thresholds of requests that bring none of their own.
        random: source of the jitter in ``retry_after_s``.
    """

    def __init__(self, limits: Limits, *, random: random.Random) -> None:
        self.limits = limits
        self._random = random
        self._line = Line(aging_s=limits.aging_s)
        self._tickets: dict[int, Ticket] = {}  # waiting
        self._running: dict[int, Ticket] = {}
        self._numbers = 0
        self._sequences = 0  # of those running: a request of n texts is n of them
        self._signals = Signals(limits)
        self._pushed: list[Ticket] = []
        self._hold: Hold | None = None
        self._prefill = PrefillBacklog()
        self._experience = Experience(limits)
        self.rates = self._experience.rates
        self.limit = self._experience.limit
        self._memory = Memory(self._signals, self._experience)
        self.forecast = self._memory.forecast
        self._ladders = Ladders(limits.rungs)
        self.circuit = Circuit()

    # What the backend says

    def told(self, load: Load | None, now: float) -> None:
        """The engine's word after a step; ``None`` changes nothing but is no sign of life either."""
        if load is None:
            return
        self._signals.told(load, now)
        if load.max_running:
            self.limit.bound(load.max_running)
        if self._line:
            self._memory.refresh(now)  # here once a step, not in the decisions after it

    # A request's way

    def offer(self, demand: Demand, now: float) -> Ticket | Refusal:
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
        uncached, busy = self._experience.uncached(demand), bool(self._running)
        rung = self._ladders.of(limits.rungs).at(self.depth)
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
        elif self._out_of_memory(demand, limits, now):
            reason = Reason.MEMORY_PRESSURE
        elif self._full(demand, limits, factor) and not self._make_room(demand, now):
            reason = Reason.QUEUE_FULL
        elif wait_s >= limits.max_wait_s * factor or self._experience.misses(
            demand.due, first_s, now, busy=busy
        ):
            reason = Reason.MEMORY_PRESSURE if self.hold is Hold.MEMORY else Reason.WAIT_EXCEEDED
        if reason is not None:
            return self._refusal(reason, wait_s, now)

        self._numbers += 1
        leave_at, due = now + limits.max_wait_s * factor, demand.due
        if due is not None:
            # By then even an empty engine would be too slow; what is too late before that, `pump` finds.
            forgotten = self._experience.forgotten(now, busy=busy)
            leave_at = min(leave_at, due - (0.0 if forgotten else self.rates.first_token_s(uncached)))
        expected = self._experience.expect(demand, max_tokens)
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
        ticket = Ticket(demand, item, demand.kind, uncached, max_tokens, expected, wait_s, first_s)
        self._tickets[item.number] = ticket
        self._line.join(item)
        return ticket

    def pushed_out(self) -> list[Ticket]:
        """Those who had to make room, or whose turn came too late, since this was last asked."""
        out, self._pushed = self._pushed, []
        return out

    def pump(self, now: float) -> list[Ticket]:
        """Hand on as many as the backend should have now, in the order of the line.

        One whose first token would come too late is not begun, and while the circuit is open none is:
        :meth:`pushed_out` tells them.
        """
        handed_on: list[Ticket] = []
        if not self._line:
            self._hold = None
            return handed_on
        if self.circuit.state(now) is CircuitState.OPEN:
            self._all_away(Reason.CIRCUIT_OPEN, now)
            return handed_on
        self._line.age(now)
        while (item := self._line.peek()) is not None:
            ticket = self._tickets[item.number]
            self._hold = self._holds(ticket, now)
            if self._hold is not None:
                break
            del self._tickets[item.number]
            if self._too_late(ticket, now):
                self._line.leave(item)
                self._gone(ticket, Reason.WAIT_EXCEEDED, now)
                self._pushed.append(ticket)
                continue
            self._line.serve(item)
            self._hand_on(ticket, now)
            handed_on.append(ticket)
        return handed_on

    def expired(self, now: float) -> list[Ticket]:
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

    def first_token(self, ticket: Ticket, now: float, cached_tokens: int | None) -> None:
        """The first piece of its answer is there."""
        if ticket.state is not TicketState.HANDED_ON or ticket.first_token_at is not None:
            return
        ticket.first_token_at = now
        self._prefill.done(ticket.number, now)
        self._experience.first_token(ticket, now, cached_tokens)
        if cached_tokens is not None:
            self.forecast.cached(ticket.number, max(0, ticket.demand.input_tokens - cached_tokens))

    def release(self, ticket: Ticket, outcome: Outcome, now: float, *, output_tokens: int) -> None:
        """Its work has ended, or it left the line by itself; a second word about it changes nothing."""
        if ticket.state is TicketState.WAITING:
            del self._tickets[ticket.number]
            self._line.leave(ticket.waiting)
            ticket.state = TicketState.GONE
            return
        if ticket.state is not TicketState.HANDED_ON:
            return
        ticket.state = TicketState.GONE
        in_flight, sequences = self._sequences, ticket.demand.sequences
        self._sequences -= sequences
        self._signals.left(sequences, ticket.handed_on_at)
        del self._running[ticket.number]
        self._memory.remove(ticket)
        if ticket.first_token_at is None:
            self._prefill.done(ticket.number, now)
        if outcome is Outcome.IGNORED:
            return
        self.circuit.saw(outcome is Outcome.DROPPED, now)
        if outcome is Outcome.SUCCEEDED:
            self._experience.succeeded(ticket, output_tokens, in_flight, now)

    # What an operator sees

    @property
    def load(self) -> Load | None:
        """What the backend told last."""
        return self._signals.load

    def silent_s(self, now: float) -> float:
        """How long the backend has told nothing new."""
        return self._signals.silent_s(now)

    @property
    def ladder(self) -> Ladder:
        """The ladder of requests that bring none of their own."""
        return self._ladders.own

    @property
    def prefill_backlog(self) -> int:
        """Uncached prompt tokens handed on and without a first token."""
        return self._prefill.total

    @property
    def waiting_tokens(self) -> int:
        """Uncached prompt tokens in the line."""
        return self._line.tokens

    @property
    def waiting_bytes(self) -> int:
        """Bytes that those in the line keep in memory."""
        return self._line.size_bytes

    def capacity(self, now: float) -> int:
        """Sequences that may be in flight now."""
        return self._signals.capacity(self.limit.value, now, busy=bool(self._running))

    @property
    def in_flight(self) -> int:
        """Requests handed on and not released."""
        return len(self._running)

    @property
    def sequences(self) -> int:
        """Sequences of those requests."""
        return self._sequences

    @property
    def running(self) -> Collection[Ticket]:
        """Those handed on and not released, in order."""
        return self._running.values()

    @property
    def waiting(self) -> Collection[Ticket]:
        """Those in the line, in order of arrival."""
        return self._tickets.values()

    @property
    def queued(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @property
    def hold(self) -> Hold | None:
        """What kept the next in line at the last look; nothing when nobody waits."""
        return self._hold if self._line else None

    @property
    def depth(self) -> int:
        """Requests that wait for the backend: here, and inside it those that did not come through here."""
        return len(self._line) + self._foreign_waiting()

    def queue_counts(self) -> dict[tuple[int, str], int]:
        """Waiting requests by class and tenant."""
        return self._line.counts()

    def usage(self, now: float) -> tuple[float, float]:
        """Share of the KV pool in use now, and at the fullest moment to come."""
        return self._memory.usage(now)

    # Parts of the decisions

    def _holds(self, ticket: Ticket, now: float) -> Hold | None:
        """What keeps this one from being handed on now."""
        foreign = self._foreign()
        if not self._running and not foreign:
            return None  # an idle backend takes anything; what never fits is its own to refuse
        limits = ticket.demand.limits or self.limits
        if self._sequences + foreign >= self.capacity(now):
            return Hold.SLOTS
        if self._signals.waiting > limits.engine_queue * self._signals.workers:
            return Hold.SLOTS
        if self._prefill_ahead(now) >= limits.max_prefill_tokens and not self.rates.prefill_is_free:
            return Hold.PREFILL
        return Hold.MEMORY if self._memory.holds(ticket, limits, now) else None

    def _too_late(self, ticket: Ticket, now: float) -> bool:
        """Whether its first token would come after it is due even if it were handed on now."""
        if ticket.demand.due is None:
            return False
        first_s = self.rates.first_token_s(self._prefill_ahead(now) + ticket.uncached)
        return self._experience.misses(ticket.demand.due, first_s, now, busy=bool(self._running))

    def _hand_on(self, ticket: Ticket, now: float) -> None:
        ticket.state = TicketState.HANDED_ON
        ticket.handed_on_at = now
        ticket.ahead_at_hand_over = self._prefill_ahead(now) + ticket.uncached
        self._prefill.add(ticket.number, ticket.uncached, now)
        self._running[ticket.number] = ticket
        self._sequences += ticket.demand.sequences
        self._memory.add(ticket)

    def _prefill_ahead(self, now: float) -> int:
        """Prompt tokens that one of the backend's workers must compute before a new one's."""
        return self._prefill.ahead(now, self.rates.s_per_token) // self._signals.workers

    def _estimates(self, demand: Demand, uncached: int, now: float) -> tuple[float, float]:
        """Seconds until it would be handed on (for a slot, or for prefill ahead), and to its first token."""
        rates, signals, waiting = self.rates, self._signals, len(self._line)
        ahead = self._line.ahead_of(demand.tenant, demand.priority) if waiting else 0
        tokens_ahead = self._prefill_ahead(now)
        if ahead:
            tokens_ahead += self._line.tokens * ahead // waiting // signals.workers
        places = self.capacity(now)
        if self.hold is Hold.MEMORY and self._sequences:
            places = self._sequences  # memory is what bounds the batch: it holds what it holds now
        foreign = self._foreign()
        free = max(0, places - self._sequences - foreign)
        missing = ahead + min(signals.waiting, foreign) + demand.sequences - free
        slot_s = missing * rates.hold_s.value / places if missing > 0 else 0.0
        beyond = tokens_ahead - self.limits.max_prefill_tokens
        prefill_s = beyond * rates.s_per_token if beyond > 0 else 0.0
        first_s = max(rates.first_token_s(tokens_ahead + uncached), slot_s + rates.first_token_s(uncached))
        return max(slot_s, prefill_s), first_s

    def _foreign(self) -> int:
        return self._signals.foreign(self._sequences)

    def _foreign_waiting(self) -> int:
        return min(self._signals.waiting, self._foreign())

    def _out_of_memory(self, demand: Demand, limits: Limits, now: float) -> bool:
        """Whether waiting here would not help: the pool is all but full, or full of what is not ours."""
        used = self._memory.used(now)
        if not self._running:
            return bool(self._foreign()) and used >= limits.pressure_of(demand.priority)[0]
        return used >= limits.oom_watermark

    def _full(self, demand: Demand, limits: Limits, factor: float) -> bool:
        waiting = self.depth
        if not waiting:
            return limits.max_queue == 0 and self._sequences + self._foreign() >= self.limit.value
        return (
            waiting >= limits.max_queue * factor
            or self._line.tokens + demand.input_tokens > limits.max_queue_tokens
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

    def _gone(self, ticket: Ticket, reason: Reason, now: float) -> None:
        ticket.state = TicketState.GONE
        wait_s = max(ticket.estimated_wait_s, now - ticket.waiting.arrived_at)
        ticket.refusal = self._refusal(reason, wait_s, now, queued=True)

    def _refusal(self, reason: Reason, wait_s: float, now: float, *, queued: bool = False) -> Refusal:
        turnover_s = self.rates.hold_s.value / max(1, self.limit.value)
        again_s = retry_after_s(wait_s, turnover_s, self._random.random())
        if reason is Reason.CIRCUIT_OPEN:
            again_s = max(again_s, self.circuit.retry_after_s(now))
        return Refusal(reason, wait_s, again_s, queued)

    def _wait_of(self, ticket: Ticket) -> float:
        limits = ticket.demand.limits or self.limits
        return limits.max_wait_s * (limits.priority_factor if ticket.demand.priority > 0 else 1.0)
