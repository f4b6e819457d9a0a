"""The requests handed to a backend, its reports, and the estimates learned from it; without the queue."""

import sys

from msgspec import Struct

from admission.estimator import Estimator
from admission.events import SUCCEEDED, SlotOutcome
from admission.memory import KvMemory
from admission.prefill import PrefillBacklog
from admission.signals import LoadSignals
from admission.ticket import GONE, HANDED_ON, IDLE_ENGINE, AdmissionTicket, Hold
from admission.values import AdmissionLimits, BackendLoad, Demand

# One place in this many is reserved for high priority while such requests arrive; else each of them would
# wait for an answer to end, and several at once for several answers. With fewer places none is reserved.
PLACES_A_RESERVE = 16
# For low priority one further place in this many is reserved, for all other requests while they arrive.
PLACES_A_LOW_RESERVE = 8
# The least bound on prompt tokens handed on: with less, an engine would be idle between two prompts.
LEAST_PREFILL = 256
# Prompt tokens that an engine computes in this time are handed on whatever the bound: a request that comes
# after them waits no longer for them than for one step of a decoding GPU.
FREE_PREFILL_S = 0.02
RESERVE_FOR_S = 10.0  # requests of a kind count as arriving for this long after the last one
# Without an arrival for this long, refusing a late request would serve no other request earlier.
QUIET_S = 1.0


class Room(Struct, frozen=True):
    """The room that a backend has for a request of one class at one moment.

    The request is handed on while fewer than ``places`` sequences run; ``ahead`` are the prompt tokens that a
    worker must compute before its own, ``bound`` limits them. ``bound`` is ``None`` where lately only vectors
    were asked for: no prompt is urgent then, and requests that wait inside the engine fill its next batch.
    ``used`` is the share of the KV pool in use, as reported.
    """

    places: int
    ahead: int
    bound: int | None
    used: float


class InFlightWork:
    """One backend's work in flight; ``scale`` is the share of its sequences and blocks that is used.

    A ``hosted`` backend is a service of many engines, where no prompt waits for another one.
    """

    def __init__(self, limits: AdmissionLimits, *, hosted: bool = False) -> None:
        self._limits = limits
        self.hosted = hosted
        self.tickets: dict[int, AdmissionTicket] = {}
        self.sequences = 0  # in flight; a request of n texts counts n
        self.foreign = 0  # sequences of other callers in the engine
        self.waiting = 0  # those of them that may be waiting inside it
        self.scale = 1.0
        self._generation_seen_at = self._high_seen_at = self._normal_seen_at = self._offered_at = float(
            "-inf"
        )
        self.signals = LoadSignals(limits)
        self.prefill = PrefillBacklog()
        if hosted:
            self.prefill.set_engines(sys.maxsize, 0.0, 0.0)
        self._low_prefill = 0  # the backlog's tokens of low priority
        self.estimator = Estimator(limits)
        self.memory = KvMemory(self.signals, self.estimator, self.tickets)

    # Changes

    def report(self, load: BackendLoad, now: float) -> None:
        self.signals.report(load, now)
        if not self.hosted:
            self.prefill.set_engines(self.signals.workers, now, self.estimator.rates.s_per_token)
        if load.max_running:
            self.estimator.limit.bound(load.max_running)
        self._count_others(now)
        if self.estimator.pace.look(now):
            self.estimator.paced()

    def add(self, ticket: AdmissionTicket, now: float, ahead: int) -> None:
        """Hand a request on and reserve what it will need; ``ahead``: prompt tokens before its own."""
        ticket.state = HANDED_ON
        ticket.handed_on_at = now
        ticket.alone = not self.tickets and not self.foreign
        ticket.ahead_at_hand_over = ahead + ticket.uncached
        self.prefill.add(ticket.number, ticket.uncached, now, self.estimator.rates.s_per_token)
        if ticket.rank < 0:
            self._low_prefill += ticket.uncached
        self.tickets[ticket.number] = ticket
        self.sequences += ticket.demand.sequences
        self._count_others(now)
        self.memory.forecast.add(ticket.number, ticket.reserved)

    def first_token(self, ticket: AdmissionTicket, now: float, cached_tokens: int | None) -> None:
        if ticket.state is not HANDED_ON or ticket.first_token_at is not None:
            return
        ticket.first_token_at = now
        self._computed(ticket, now, computed=True)
        self.estimator.first_token(ticket, now, cached_tokens)
        if cached_tokens is not None:
            self.memory.forecast.cached(ticket.number, max(0, ticket.demand.input_tokens - cached_tokens))

    def remove(
        self, ticket: AdmissionTicket, outcome: SlotOutcome, now: float, *, output_tokens: int
    ) -> None:
        """The request has ended: free what was reserved. Raises KeyError when it was removed before."""
        ticket.state = GONE
        in_flight, sequences = self.sequences, ticket.demand.sequences
        del self.tickets[ticket.number]
        self.sequences -= sequences
        if ticket.handed_on_at < self.signals.reported_at:  # the report may include them
            self.signals.sequences -= sequences
        pace = self.estimator.pace
        pace.end(ticket.number, output_tokens, now)
        self._count_others(now)
        if pace.look(now):
            self.estimator.paced()
        self.memory.forecast.remove(ticket.number)
        if ticket.first_token_at is None:
            self._computed(ticket, now, computed=False)
        if outcome is SUCCEEDED:
            workers = self.signals.workers
            self.estimator.succeeded(ticket, output_tokens, in_flight, now, workers=workers)

    def _count_others(self, now: float) -> None:
        reported = self.signals
        self.foreign = more if (more := reported.sequences - self.sequences) > 0 else 0
        self.waiting = reported.waiting if reported.waiting < self.foreign else self.foreign
        self.estimator.pace.set_running(self.sequences + self.foreign, now)

    def _computed(self, ticket: AdmissionTicket, now: float, *, computed: bool) -> None:
        """Remove the request's prompt from the backlog: it is computed, or the request has ended before."""
        self.prefill.done(ticket.number, now, self.estimator.rates.s_per_token, computed=computed)
        if ticket.rank < 0:
            self._low_prefill -= ticket.uncached

    # State

    def capacity(self, now: float) -> int:
        """Sequences that may be in flight now; at least one."""
        most = int(self.estimator.limit.value * self.scale)
        if self.tickets and self.signals.silent_s(now) > self._limits.stale_s:
            most = min(most, self._limits.stale_in_flight * self.signals.workers)
        return most if most > 1 else 1

    def arrived(self, demand: Demand, now: float) -> None:
        self._offered_at = now
        if demand.priority >= 0:
            self._normal_seen_at = now
        if demand.priority > 0:
            self._high_seen_at = now
        if demand.generates:
            self._generation_seen_at = now

    def room(self, demand: Demand, rank: int, now: float) -> Room:
        most = places = self.capacity(now)
        if rank <= 0 and now - self._high_seen_at <= RESERVE_FOR_S:
            places -= most // PLACES_A_RESERVE
        if rank < 0 and now - self._normal_seen_at <= RESERVE_FOR_S:
            places -= most // PLACES_A_LOW_RESERVE
        s_per_token, bound = self.estimator.rates.s_per_token, None
        if demand.generates or now - self._generation_seen_at <= RESERVE_FOR_S:
            limits = demand.limits or self._limits
            bound = limits.max_prefill_tokens
            if s_per_token > 0.0:
                bound = int(min(bound, max(LEAST_PREFILL, limits.max_prefill_s / s_per_token)))
                bound = max(bound, int(FREE_PREFILL_S / s_per_token))
        used = self.signals.kv_usage(now, busy=bool(self.tickets))
        self.prefill.give_up_overtaken(now, s_per_token)
        return Room(places, self.prefill.ahead(now, s_per_token), bound, used)

    @property
    def busy_since(self) -> float | None:
        """When the oldest request in flight was handed on."""
        return next(iter(self.tickets.values())).handed_on_at if self.tickets else None

    def hold_s(self, now: float) -> float:
        """Mean seconds that a place is occupied; before the first answer's end, the oldest request's age."""
        since = self.busy_since
        if self.estimator.rates.hold_s.samples or since is None:
            return self.estimator.rates.hold_s.value
        return now - since

    def out_of_memory(self, priority: int, limits: AdmissionLimits, used: float) -> bool:
        """Whether waiting would not help: the pool is nearly full, or full of other callers' sequences."""
        if not self.tickets:
            return bool(self.foreign) and used >= limits.pressure_of(priority)[0]
        return used >= limits.oom_watermark

    def holds(self, ticket: AdmissionTicket, room: Room, now: float) -> Hold | None:
        """What keeps the request from being handed on now, with this ``room``; ``None``: nothing."""
        limits, foreign = ticket.demand.limits or self._limits, self.foreign
        if not self.tickets and not foreign:
            # An idle backend gets any request: the engine itself refuses what can never fit.
            if self.memory.holds(ticket, limits, room.used, now, scale=self.scale):
                ticket.beyond = IDLE_ENGINE
            return None
        if self.sequences + foreign >= room.places:
            return Hold.SLOTS
        if room.bound is not None:
            if self.signals.waiting > limits.engine_queue * self.signals.workers:
                return Hold.SLOTS
            ahead = room.ahead
            if ticket.rank >= 0:
                # Waiting here for low-priority prompts takes as long as waiting for them inside the engine.
                ahead -= self._low_prefill // self.signals.workers
            elif ahead and now - self._normal_seen_at <= RESERVE_FOR_S:
                # Its own prompt counts too, so that other requests that arrive meanwhile find room after it.
                ahead += ticket.uncached
            if ahead >= room.bound and not self.estimator.rates.prefill_is_free:
                return Hold.PREFILL
        return Hold.MEMORY if self.memory.holds(ticket, limits, room.used, now, scale=self.scale) else None

    def too_late(self, ticket: AdmissionTicket, room: Room, now: float) -> bool:
        """Whether its first token would come after it is due even if it were handed on now.

        While other requests arrive, current estimates say when it is due, else those of its offer: a burst on
        an idle engine, whose speed was unknown at the offer, is served.
        """
        due = ticket.deadline
        if now - self._offered_at <= QUIET_S:
            limits = ticket.demand.limits or self._limits
            alone_s = self.estimator.first_token_s(ticket.uncached)
            _, due = self.estimator.longest_wait(ticket.demand, limits, alone_s)
        if due is None:
            return False
        first_s = self.estimator.first_token_s(room.ahead + ticket.uncached, self.busy_since)
        return self.estimator.misses(due, first_s, now, busy=bool(self.tickets))
