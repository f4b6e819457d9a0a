"""What a backend has been handed: what it works on, what it says of itself, what it has been seen to do.

The gate asks it whether one more may go on, and how long that will take; it decides nothing about the line.
"""

from __future__ import annotations

from typing import NamedTuple

from admission.estimator import Estimator
from admission.events import SlotOutcome
from admission.memory import KvMemory
from admission.prefill import PrefillBacklog
from admission.signals import LoadSignals
from admission.ticket import AdmissionTicket, Beyond, Hold, TicketState
from admission.values import AdmissionLimits, BackendLoad, Demand

# Of so many places one is kept free for the high priority, while such requests come: else each of them would
# wait for an answer to end, and those who come together for several. Fewer places are all for everybody.
PLACES_A_RESERVE = 16
# They come while the last one was so long ago.
RESERVE_FOR_S = 10.0


class Ahead(NamedTuple):
    """What of the line would be served before a request: how many, and their uncached prompt tokens."""

    requests: int = 0
    tokens: int = 0


NOBODY = Ahead()


class InFlightWork:
    """One backend's work in flight.

    Args:
        limits: the thresholds of requests that bring none of their own.

    Attributes:
        scale: share of the sequences and blocks that is used, above 0 and at most 1.
    """

    __slots__ = (
        "_high_seen_at", "_limits", "experience", "memory", "prefill", "scale", "sequences", "signals",
        "tickets",
    )  # fmt: skip

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.tickets: dict[int, AdmissionTicket] = {}
        self.sequences = 0  # a request of n texts is n of them
        self.scale = 1.0
        self._high_seen_at = float("-inf")
        self.signals = LoadSignals(limits)
        self.prefill = PrefillBacklog()
        self.experience = Estimator(limits)
        self.memory = KvMemory(self.signals, self.experience)

    # What becomes of the work

    def told(self, load: BackendLoad, now: float) -> None:
        """The engine's word after a step."""
        self.signals.told(load, now)
        self.prefill.bound(self.signals.workers, now, self.experience.rates.s_per_token)
        if load.max_running:
            self.experience.limit.bound(load.max_running)
        self.experience.pace.beside(self.sequences + self.foreign, now)
        self.experience.look(now)

    def add(self, ticket: AdmissionTicket, now: float) -> None:
        """It is handed on, and what it will need is reserved."""
        ticket.state = TicketState.HANDED_ON
        ticket.handed_on_at = now
        ticket.alone = self.idle
        ticket.ahead_at_hand_over = self.prefill_ahead(now) + ticket.uncached
        self.prefill.add(ticket.number, ticket.uncached, now, self.experience.rates.s_per_token)
        self.tickets[ticket.number] = ticket
        self.sequences += ticket.demand.sequences
        self.experience.pace.beside(self.sequences + self.foreign, now)
        self.memory.add(ticket)

    def first_token(self, ticket: AdmissionTicket, now: float, cached_tokens: int | None) -> None:
        """The first piece of its answer is there."""
        ticket.first_token_at = now
        self.prefill.done(ticket.number, now, self.experience.rates.s_per_token)
        self.experience.first_token(ticket, now, cached_tokens)
        if cached_tokens is not None:
            self.memory.forecast.cached(ticket.number, max(0, ticket.demand.input_tokens - cached_tokens))

    def remove(
        self, ticket: AdmissionTicket, outcome: SlotOutcome, now: float, *, output_tokens: int
    ) -> None:
        """It has ended, and what was reserved is free. Raises KeyError when that was done before."""
        ticket.state = TicketState.GONE
        in_flight, sequences = self.sequences, ticket.demand.sequences
        del self.tickets[ticket.number]
        self.sequences -= sequences
        self.signals.left(sequences, ticket.handed_on_at)
        self.experience.pace.end(ticket.number, output_tokens, now)
        self.experience.pace.beside(self.sequences + self.foreign, now)
        self.experience.look(now)
        self.memory.remove(ticket)
        if ticket.first_token_at is None:
            self.prefill.done(ticket.number, now, self.experience.rates.s_per_token)
        if outcome is SlotOutcome.SUCCEEDED:
            workers = self.signals.workers
            self.experience.succeeded(ticket, output_tokens, in_flight, now, workers=workers)

    # How it stands

    @property
    def idle(self) -> bool:
        """Whether the backend has nothing to do, neither from here nor, as told, from elsewhere."""
        return not self.tickets and not self.foreign

    @property
    def foreign(self) -> int:
        """Sequences there that are none of ours."""
        return self.signals.foreign(self.sequences)

    @property
    def foreign_waiting(self) -> int:
        """Of those that wait inside the engine, as many as may be none of ours."""
        return min(self.signals.waiting, self.foreign) if self.signals.waiting else 0

    def capacity(self, now: float) -> int:
        """Sequences that may be in flight now; at least one."""
        most = int(self.experience.limit.value * self.scale)
        return self.signals.capacity(most, now, busy=bool(self.tickets))

    def asked(self, priority: int, now: float) -> None:
        """A request of that priority has come."""
        if priority > 0:
            self._high_seen_at = now

    def places(self, rank: int, now: float) -> int:
        """Sequences up to which one of that class is handed on."""
        most = self.capacity(now)
        if rank > 0 or now - self._high_seen_at > RESERVE_FOR_S:
            return most
        return most - most // PLACES_A_RESERVE

    def prefill_ahead(self, now: float) -> int:
        """Prompt tokens that one of the backend's workers must compute before a new one's."""
        return self.prefill.ahead(now, self.experience.rates.s_per_token)

    def hold_s(self, now: float) -> float:
        """How long a place is held; while no answer has ended, as long as the oldest has been there."""
        if self.experience.rates.hold_s.samples or not self.tickets:
            return self.experience.rates.hold_s.value
        return now - next(iter(self.tickets.values())).handed_on_at

    def out_of_memory(self, priority: int, limits: AdmissionLimits, now: float) -> bool:
        """Whether waiting would not help: the pool is all but full, or full of what is not ours."""
        used = self.memory.used(now)
        if not self.tickets:
            return bool(self.foreign) and used >= limits.pressure_of(priority)[0]
        return used >= limits.oom_watermark

    def holds(self, ticket: AdmissionTicket, now: float) -> Hold | None:
        """What keeps this one from being handed on now."""
        limits, foreign = ticket.demand.limits or self._limits, self.foreign
        if not self.tickets and not foreign:
            # An idle backend takes anything; what never fits is its own to refuse.
            if self.memory.holds(ticket, limits, now, scale=self.scale):
                ticket.beyond = Beyond.IDLE_ENGINE
            return None
        if self.sequences + foreign >= self.places(ticket.waiting.rank, now):
            return Hold.SLOTS
        if self.signals.waiting > limits.engine_queue * self.signals.workers:
            return Hold.SLOTS
        rates = self.experience.rates
        if self.prefill_ahead(now) >= limits.max_prefill_tokens and not rates.prefill_is_free:
            return Hold.PREFILL
        return Hold.MEMORY if self.memory.holds(ticket, limits, now, scale=self.scale) else None

    def too_late(self, ticket: AdmissionTicket, now: float) -> bool:
        """Whether its first token would come after it is due even if it were handed on now."""
        due = ticket.waiting.deadline
        if due is None:
            return False
        return self.misses(due, self._first_token_s(self.prefill_ahead(now) + ticket.uncached), now)

    def misses(self, due: float | None, first_s: float, now: float) -> bool:
        """Whether a first token that is expected in ``first_s`` comes too late."""
        return self.experience.misses(due, first_s, now, busy=bool(self.tickets))

    def alone_s(self, uncached: int, now: float) -> float:
        """Seconds to the first token on an empty engine; 0 where what is known is too old to refuse for."""
        if self.experience.forgotten(now, busy=bool(self.tickets)):
            return 0.0
        return self.experience.first_token_s(uncached, busy=False)

    def estimates(
        self, demand: Demand, uncached: int, ahead: Ahead, now: float, *, by_memory: bool
    ) -> tuple[float, float]:
        """Seconds until it would be handed on (for a slot, or for prefill ahead), and to its first token.

        Args:
            by_memory: memory is what bounds the batch: it holds what it holds now.
        """
        rates, signals = self.experience.rates, self.signals
        tokens_ahead = self.prefill_ahead(now) + ahead.tokens // signals.workers
        places = self.places(demand.priority, now)
        if by_memory and self.sequences:
            places = self.sequences
        foreign = self.foreign
        missing = ahead.requests + min(signals.waiting, foreign) + demand.sequences
        missing -= max(0, places - self.sequences - foreign)
        slot_s = missing * rates.hold_s.value / places if missing > 0 else 0.0
        beyond = tokens_ahead - self._limits.max_prefill_tokens
        prefill_s = beyond * rates.s_per_token if beyond > 0 else 0.0
        first_s = self._first_token_s(tokens_ahead + uncached)
        if slot_s > 0.0:
            first_s = max(first_s, slot_s + self._first_token_s(uncached))
        return max(slot_s, prefill_s), first_s

    def _first_token_s(self, tokens_ahead: int) -> float:
        return self.experience.first_token_s(tokens_ahead, busy=bool(self.tickets))
