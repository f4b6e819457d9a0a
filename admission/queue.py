"""A thin asyncio shell over :class:`admission.gate.BackendGate`.

It keeps the time, wakes those who may go on and those who must leave, and tells what happened. It decides
nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from admission.errors import Refused
from admission.events import AdmissionEvent, Admitted, FirstToken, RefusedEvent, Released, SlotOutcome
from admission.gate import BackendGate
from admission.ticket import AdmissionTicket, Refusal, TicketState
from admission.values import BackendLoad, Demand


class Slot:
    """The permission to generate; given back when its ``async with`` block is left.

    Say how the work ended with :meth:`succeeded`, :meth:`dropped` or :meth:`ignored`; the first word
    counts. Unsaid, leaving normally is a success, an exception means dropped, a cancellation ignored.
    """

    __slots__ = ("_desk", "_ended_at", "_outcome", "ticket")

    def __init__(self, desk: AdmissionQueue, ticket: AdmissionTicket) -> None:
        self._desk = desk
        self.ticket = ticket
        self._outcome: SlotOutcome | None = None
        self._ended_at = 0.0

    @property
    def backend(self) -> str:
        """The backend the slot is for."""
        return self.ticket.demand.backend

    @property
    def max_tokens(self) -> int:
        """Tokens the answer may have: what was asked, or what a long queue leaves of it."""
        return self.ticket.max_tokens

    @property
    def shrunk(self) -> bool:
        """Whether a long queue has shortened the answer."""
        return self.ticket.shrunk

    @property
    def waited_s(self) -> float:
        """How long the request was queued for the slot."""
        return self.ticket.handed_on_at - self.ticket.waiting.arrived_at

    def first_token(self, cached_tokens: int | None) -> None:
        """The first piece of the answer is there; ``cached_tokens`` as the backend told them."""
        self._desk.first_token(self.ticket, cached_tokens)

    def succeeded(self) -> None:
        """The answer is whole."""
        self._end(SlotOutcome.SUCCEEDED)

    def dropped(self) -> None:
        """The backend failed; its time says nothing about a working one."""
        self._end(SlotOutcome.DROPPED)

    def ignored(self) -> None:
        """It ended for reasons that say nothing about the backend (the caller left)."""
        self._end(SlotOutcome.IGNORED)

    def _end(self, outcome: SlotOutcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._ended_at = self._desk.clock()

    def ended(self, unsaid: SlotOutcome) -> tuple[SlotOutcome, float]:
        """How and when the work ended; ``unsaid`` when nobody has told."""
        self._end(unsaid)
        return self._outcome or unsaid, self._ended_at


class AdmissionQueue:
    """One gate, the futures of those who wait at it, and the timer of what the clock alone changes."""

    def __init__(
        self,
        gate: BackendGate,
        *,
        load: Callable[[], BackendLoad | None],
        clock: Callable[[], float],
        emit: Callable[[AdmissionEvent], None],
    ) -> None:
        self.gate = gate
        self.clock = clock
        self._load = load
        self._emit = emit
        self._waiting: dict[AdmissionTicket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def enter(self, demand: Demand) -> Slot:
        """A slot, after waiting for it if need be."""
        now = self.clock()
        self._listen(now)
        offered = self.gate.offer(demand, now)
        if isinstance(offered, Refusal):
            raise self._refused(demand, offered)
        self._settle(now)
        if offered.state is TicketState.WAITING:
            await self._wait(offered)
        if offered.refusal is not None:
            waited_s = self.clock() - offered.waiting.arrived_at
            raise self._refused(demand, offered.refusal, waited_s)
        return Slot(self, offered)

    def leave(self, slot: Slot, unsaid: SlotOutcome) -> None:
        """A slot comes back; somebody else may go on."""
        outcome, ended_at = slot.ended(unsaid)
        ticket = slot.ticket
        self.gate.release(ticket, outcome, ended_at, output_tokens=ticket.demand.produced())
        self._emit(
            Released(
                backend=ticket.demand.backend,
                tenant=ticket.demand.tenant,
                outcome=outcome,
                held_s=ended_at - ticket.handed_on_at,
                estimated_wait_s=ticket.estimated_wait_s,
                in_flight=self.gate.in_flight,
            )
        )
        if self.gate.queued:
            self.look()

    def first_token(self, ticket: AdmissionTicket, cached_tokens: int | None) -> None:
        """A prefill has ended; somebody else's may begin."""
        if ticket.first_token_at is not None:
            return
        now = self.clock()
        self.gate.first_token(ticket, now, cached_tokens)
        self._emit(
            FirstToken(ticket.demand.backend, ticket.estimated_first_token_s, now - ticket.waiting.arrived_at)
        )
        if self.gate.queued:
            self.look()

    def stepped(self) -> None:
        """The backend lives, even when its load is what it was."""
        now = self.clock()
        self.gate.told(self._load(), now)
        if self.gate.queued:
            self._settle(now)

    def look(self) -> None:
        """Hand on, and send away, what this moment says."""
        now = self.clock()
        self._listen(now)
        self._settle(now)

    def _listen(self, now: float) -> None:
        # The same word read again is no sign of life: it may be an old one.
        load = self._load()
        if load is not None and load != self.gate.load:
            self.gate.told(load, now)

    def _settle(self, now: float) -> None:
        """Act on what the gate says, until it says nothing more."""
        self._resolve(self.gate.pushed_out())
        if self.gate.queued:
            self._resolve(self.gate.expired(now))
            for ticket in self.gate.pump(now):
                self._emit(self._admitted(ticket))
                self._resolve((ticket,))
            self._resolve(self.gate.pushed_out())
        self._set_timer(now)

    async def _wait(self, ticket: AdmissionTicket) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        try:
            await future
        except asyncio.CancelledError:
            # Perhaps it was handed on in the same turn of the loop: either way the gate is told once.
            self.gate.release(ticket, SlotOutcome.IGNORED, self.clock(), output_tokens=0)
            self.look()
            raise
        finally:
            self._waiting.pop(ticket, None)

    def _resolve(self, tickets: Iterable[AdmissionTicket]) -> None:
        for ticket in tickets:
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)

    def _set_timer(self, now: float) -> None:
        at = self.gate.next_change() if self.gate.queued else None
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._due)

    def _due(self) -> None:
        self._timer = None
        self.look()

    def _admitted(self, ticket: AdmissionTicket) -> Admitted:
        demand = ticket.demand
        return Admitted(
            backend=demand.backend,
            tenant=demand.tenant,
            priority=demand.priority,
            estimated_wait_s=ticket.estimated_wait_s,
            queue_depth=self.gate.queued,
            kv_usage=self.gate.load.kv_usage if self.gate.load else 0.0,
            in_flight=self.gate.in_flight,
            waited_s=ticket.handed_on_at - ticket.waiting.arrived_at,
            shrunk=ticket.shrunk,
            beyond=ticket.beyond.value if ticket.beyond else None,
        )

    def _refused(self, demand: Demand, refusal: Refusal, waited_s: float = 0.0) -> Refused:
        self._emit(
            RefusedEvent(
                backend=demand.backend,
                tenant=demand.tenant,
                priority=demand.priority,
                reason=refusal.reason,
                estimated_wait_s=refusal.estimated_wait_s,
                retry_after_s=refusal.retry_after_s,
                queue_depth=self.gate.queued,
                kv_usage=self.gate.load.kv_usage if self.gate.load else 0.0,
                in_flight=self.gate.in_flight,
                queued=refusal.queued,
            )
        )
        return Refused(
            refusal.reason,
            estimated_wait_s=refusal.estimated_wait_s,
            retry_after_s=refusal.retry_after_s,
            waited_s=waited_s,
        )
