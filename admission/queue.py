"""A thin asyncio shell over :class:`admission.gate.BackendGate`.

It keeps the time, wakes requests that are handed on or refused, and emits the events. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from admission.errors import Refused
from admission.events import (
    IGNORED,
    SUCCEEDED,
    AdmissionEvent,
    Admitted,
    FirstToken,
    RefusedEvent,
    SlotOutcome,
)
from admission.gate import BackendGate
from admission.ticket import HANDED_ON, WAITING, AdmissionTicket, Refusal
from admission.values import BackendLoad, Demand

# While no request waits, the load after a step is read when something needs it, else at most this often,
# seconds: a step may take a few milliseconds.
READ_EVERY_S = 0.05
# A pool of workers reports no steps: while requests wait, its load is read this often, seconds.
LOOK_EVERY_S = 0.25


class Slot(Struct, eq=False):
    """The permission to generate; given back when its ``async with`` block is left.

    The first of :meth:`succeeded` and :meth:`ignored` counts. Without one, a normal exit is a success, an
    exception means dropped, a cancellation ignored.
    """

    _queue: AdmissionQueue
    ticket: AdmissionTicket
    max_tokens: int  # that the answer may have: as asked, or less because of a long queue
    shrunk: bool  # whether a long queue has shortened the answer
    waited_s: float  # how long the request was queued for the slot
    ended: tuple[SlotOutcome, float] | None = None  # how and when the work ended

    def first_token(self, cached_tokens: int | None) -> None:
        """The answer has its first token: hand others on. ``cached_tokens`` as the backend reported."""
        queue, ticket = self._queue, self.ticket
        if ticket.state is not HANDED_ON or ticket.first_token_at is not None:
            return  # it has ended, and what follows is a stored text
        now, gate = queue.clock(), queue.gate
        gate.first_token(ticket, now, cached_tokens)
        queue.emit(FirstToken(ticket.estimated_first_token_s, now - ticket.arrived_at))
        if gate.tickets:
            queue.look()

    def succeeded(self, cached_tokens: int | None = None) -> None:
        """The answer is complete; many backends report ``cached_tokens`` only then."""
        if self.ticket.cached_tokens is None:
            self.ticket.cached_at_end = cached_tokens
        self._end(SUCCEEDED)

    def ignored(self) -> None:
        """The request ended for a reason outside the backend, such as a disconnect."""
        self._end(IGNORED)

    def _end(self, outcome: SlotOutcome) -> None:
        if self.ended is None:
            self.ended = outcome, self._queue.clock()


@dataclass(slots=True, eq=False)
class AdmissionQueue:
    """One gate, the futures of its waiting requests, and a timer for changes by time alone."""

    _gate: BackendGate
    load: Callable[[], BackendLoad | None]
    clock: Callable[[], float]
    emit: Callable[[AdmissionEvent], None]
    _waiting: dict[AdmissionTicket, asyncio.Future[None]] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None
    _timer_at: float = 0.0
    # When the backend ran its last step, if its load after that step was not read.
    _unread_at: float | None = None

    @property
    def gate(self) -> BackendGate:
        """The gate, with the load after the last step, for calls from outside and :meth:`listen`."""
        if self._unread_at is not None:
            at, self._unread_at = self._unread_at, None
            self._gate.report(self.load(), at)
        return self._gate

    async def enter(self, demand: Demand) -> Slot:
        now = self.clock()
        self.listen(now)
        ticket = self._gate.offer(demand, now, at_once=True)
        if isinstance(ticket, Refusal):
            raise self._refused(demand, ticket)
        if ticket.state is HANDED_ON:
            self.emit(self._admitted(ticket))
        else:
            self._settle(now)
            if ticket.state is WAITING:
                await self._wait(ticket)
            if ticket.refusal is not None:
                raise self._refused(demand, ticket.refusal, self.clock() - ticket.arrived_at)
        waited_s = ticket.handed_on_at - ticket.arrived_at
        return Slot(self, ticket, ticket.max_tokens, ticket.shrunk, waited_s)

    def stepped(self) -> None:
        """The backend has run a step: a sign of life even with an unchanged load."""
        now, gate = self.clock(), self._gate
        if not gate.tickets and now - gate.work.signals.reported_at < READ_EVERY_S:
            self._unread_at = now
            return
        self._unread_at = None
        gate.report(self.load(), now)
        if gate.tickets:
            self._settle(now)

    def look(self) -> None:
        """Hand on and refuse requests as of now."""
        now = self.clock()
        self.listen(now)
        self._settle(now)

    def listen(self, now: float) -> None:
        """Take the backend's load if it has changed."""
        # The same report read again is no sign of life: it may be an old one.
        load, gate = self.load(), self.gate
        if load is not None and load != gate.work.signals.load:
            gate.report(load, now)

    def _settle(self, now: float) -> None:
        self._resolve(self._gate.displaced())
        if self._gate.tickets:
            self._resolve(self._gate.expired(now))
            for ticket in self._gate.pump(now):
                self.emit(self._admitted(ticket))
                self._resolve((ticket,))
            self._resolve(self._gate.displaced())
        self._set_timer(now)

    async def _wait(self, ticket: AdmissionTicket) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        try:
            await future
        except asyncio.CancelledError:
            # It may have been handed on in the same turn of the loop; the gate releases it once either way.
            self.gate.release(ticket, IGNORED, self.clock(), output_tokens=0)
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
        at: float | None = None
        if self._gate.tickets:
            change = self._gate.queue.next_change()
            at = now + LOOK_EVERY_S if change is None else min(change, now + LOOK_EVERY_S)
        if self._timer is not None:
            if at is not None and self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.look()

    def _admitted(self, ticket: AdmissionTicket) -> Admitted:
        demand = ticket.demand
        return Admitted(
            backend=demand.backend,
            tenant=demand.tenant,
            priority=demand.priority,
            estimated_wait_s=ticket.estimated_wait_s,
            queue_depth=len(self._gate.tickets),
            kv_usage=self._gate.work.signals.load.kv_usage if self._gate.work.signals.load else 0.0,
            in_flight=len(self._gate.work.tickets),
            waited_s=ticket.handed_on_at - ticket.arrived_at,
            shrunk=ticket.shrunk,
            beyond=ticket.beyond,
        )

    def _refused(self, demand: Demand, refusal: Refusal, waited_s: float = 0.0) -> Refused:
        self.emit(
            RefusedEvent(
                backend=demand.backend,
                tenant=demand.tenant,
                priority=demand.priority,
                reason=refusal.reason,
                estimated_wait_s=refusal.estimated_wait_s,
                retry_after_s=refusal.retry_after_s,
                queue_depth=len(self._gate.tickets),
                kv_usage=self._gate.work.signals.load.kv_usage if self._gate.work.signals.load else 0.0,
                in_flight=len(self._gate.work.tickets),
                queued=refusal.queued,
            )
        )
        return Refused(
            refusal.reason,
            estimated_wait_s=refusal.estimated_wait_s,
            retry_after_s=refusal.retry_after_s,
            waited_s=waited_s,
            checked_s=0.0 if demand.deadline is None else demand.checked_s,
            first_token_s=refusal.first_token_s,
        )
