"""Admission as the journey meets it: ``async with admit(demand) as slot``.

A thin asyncio shell over :class:`admission.gate.Gate`: it keeps the time, wakes those who may go on and those
who must leave, and tells what happened. It decides nothing itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType, TracebackType

from admission.errors import Refused
from admission.events import AdmissionEvent, Admitted, FirstToken, Outcome, RefusedEvent, Released
from admission.gate import Gate
from admission.ticket import Refusal, Ticket, TicketState
from admission.values import Demand, Limits, Load


class Slot:
    """The permission to generate; given back when its ``async with`` block is left.

    Say how the work ended with :meth:`succeeded`, :meth:`dropped` or :meth:`ignored`; the first word
    counts. Unsaid, leaving normally is a success, an exception means dropped, a cancellation ignored.
    """

    __slots__ = ("_desk", "_ended_at", "_outcome", "ticket")

    def __init__(self, desk: _Desk, ticket: Ticket) -> None:
        self._desk = desk
        self.ticket = ticket
        self._outcome: Outcome | None = None
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

    def first_token(self, cached_tokens: int | None) -> None:
        """The first piece of the answer is there; ``cached_tokens`` as the backend told them."""
        self._desk.first_token(self.ticket, cached_tokens)

    def succeeded(self) -> None:
        """The answer is whole."""
        self._end(Outcome.SUCCEEDED)

    def dropped(self) -> None:
        """The backend failed; its time says nothing about a working one."""
        self._end(Outcome.DROPPED)

    def ignored(self) -> None:
        """It ended for reasons that say nothing about the backend (the caller left)."""
        self._end(Outcome.IGNORED)

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._ended_at = self._desk.clock()

    def _ended(self, unsaid: Outcome) -> tuple[Outcome, float]:
        self._end(unsaid)
        return self._outcome or unsaid, self._ended_at


class AdmissionController:
    """Gives out slots as backends can take more, in the order of the line, and tells why not otherwise.

    Args:
        limits: the thresholds of requests that bring none of their own.
        load: a backend's load as last told, by name; ``None`` when unknown. Must not block.
        clock: seconds, monotonic.
        emit: takes each event; must not block.
        random: source of the jitter in ``retry_after_s``.
        engine_of: the engine of each backend that shares one with others; all that run on one engine have one
            gate, by the engine's name. A backend that is not named has an engine of its own.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        load: Callable[[str], Load | None],
        clock: Callable[[], float],
        emit: Callable[[AdmissionEvent], None],
        random: random.Random,
        engine_of: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._limits = limits
        self._engine_of = engine_of
        self._load = load
        self._clock = clock
        self._emit = emit
        self._random = random
        self._desks: dict[str, _Desk] = {}

    def admit(self, demand: Demand) -> AbstractAsyncContextManager[Slot]:
        """``async with admit(demand) as slot``: waits in line on entry, gives the slot back on exit.

        Entry raises :class:`Refused`. A request that is cancelled leaves the line, or gives its slot back,
        at once. Exit never waits.
        """
        return _Admission(self._desk(demand.backend), demand)

    def wake(self, backend: str) -> None:
        """The backend has made a step: take its word, and look whether more can be handed on."""
        desk = self._desks.get(self._engine_of.get(backend, backend))
        if desk is not None:
            desk.stepped()

    def in_flight(self, backend: str) -> int:
        """Slots that are out now on the engine of ``backend``."""
        desk = self._desks.get(self._engine_of.get(backend, backend))
        return desk.gate.in_flight if desk else 0

    def gate(self, backend: str) -> Gate:
        """The gate of one backend, for operators' eyes."""
        return self._desk(backend).gate

    @property
    def gates(self) -> Mapping[str, Gate]:
        """The gates that have been asked so far, by the engine's or else the backend's name."""
        return {name: desk.gate for name, desk in self._desks.items()}

    def _desk(self, backend: str) -> _Desk:
        # Backends are configured, so their number is bounded.
        engine = self._engine_of.get(backend, backend)
        desk = self._desks.get(engine)
        if desk is None:
            desk = self._desks[engine] = _Desk(
                Gate(self._limits, random=self._random),
                load=lambda: self._load(backend),
                clock=self._clock,
                emit=self._emit,
            )
        return desk


class _Desk:
    """One gate, the futures of those who wait at it, and the timer of what the clock alone changes."""

    def __init__(
        self,
        gate: Gate,
        *,
        load: Callable[[], Load | None],
        clock: Callable[[], float],
        emit: Callable[[AdmissionEvent], None],
    ) -> None:
        self.gate = gate
        self.clock = clock
        self._load = load
        self._emit = emit
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
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
            raise self._refused(demand, offered.refusal)
        return Slot(self, offered)

    def leave(self, slot: Slot, unsaid: Outcome) -> None:
        """A slot comes back; somebody else may go on."""
        outcome, ended_at = slot._ended(unsaid)
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

    def first_token(self, ticket: Ticket, cached_tokens: int | None) -> None:
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

    async def _wait(self, ticket: Ticket) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        try:
            await future
        except asyncio.CancelledError:
            # Perhaps it was handed on in the same turn of the loop: either way the gate is told once.
            self.gate.release(ticket, Outcome.IGNORED, self.clock(), output_tokens=0)
            self.look()
            raise
        finally:
            self._waiting.pop(ticket, None)

    def _resolve(self, tickets: Iterable[Ticket]) -> None:
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

    def _admitted(self, ticket: Ticket) -> Admitted:
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
        )

    def _refused(self, demand: Demand, refusal: Refusal) -> Refused:
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
        )


class _Admission(AbstractAsyncContextManager[Slot]):
    """One pass through admission. Entered once: a slot belongs to one block of code."""

    __slots__ = ("_demand", "_desk", "_entered", "_slot")

    def __init__(self, desk: _Desk, demand: Demand) -> None:
        self._desk = desk
        self._demand = demand
        self._entered = False
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot:
        if self._entered:
            raise RuntimeError("an admission is entered once; ask admit() for another")
        self._entered = True
        self._slot = await self._desk.enter(self._demand)
        return self._slot

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        # Exception: the work failed. Cancellation, and what else is no Exception, is nobody's failure.
        if error is None:
            unsaid = Outcome.SUCCEEDED
        elif isinstance(error, Exception):
            unsaid = Outcome.DROPPED
        else:
            unsaid = Outcome.IGNORED
        self._desk.leave(slot, unsaid)
