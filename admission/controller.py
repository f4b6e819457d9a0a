"""Admission: one synchronous decision, and a slot that is given back exactly once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from admission.errors import Refused
from admission.events import AdmissionEvent, Admitted, Outcome, RefusedEvent, Released
from admission.signals import Reservations, Standing, Unseen, prompt_blocks, standing
from admission.values import Demand, Limits, Load, Reason
from admission.wait import ServiceTime, estimate_wait_s, retry_after_s, turnover_s


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided and on which figures; ``reason`` is ``None`` for an admission."""

    reason: Reason | None
    estimated_wait_s: float
    retry_after_s: float
    standing: Standing

    @property
    def admitted(self) -> bool:
        """Whether the request may go to its backend."""
        return self.reason is None


class Slot:
    """The permission to generate; given back when its ``async with`` block is left.

    Say how the work ended with :meth:`succeeded`, :meth:`dropped` or :meth:`ignored`; the first word
    counts. Unsaid, leaving normally is a success, an exception means dropped, a cancellation ignored.
    """

    __slots__ = (
        "_clock",
        "_ended_at",
        "_outcome",
        "_queue_wait_s",
        "admitted_at",
        "demand",
        "estimated_wait_s",
    )

    def __init__(self, demand: Demand, estimated_wait_s: float, clock: Callable[[], float]) -> None:
        self.demand = demand
        self.admitted_at = clock()
        self.estimated_wait_s = estimated_wait_s
        self._clock = clock
        self._outcome: Outcome | None = None
        self._ended_at = self.admitted_at
        self._queue_wait_s = 0.0

    @property
    def backend(self) -> str:
        """The backend the slot is for."""
        return self.demand.backend

    def succeeded(self, *, queue_wait_s: float = 0.0) -> None:
        """The answer is whole. ``queue_wait_s`` is time in the engine's own queue, which is no service."""
        if self._end(Outcome.SUCCEEDED):
            self._queue_wait_s = queue_wait_s

    def dropped(self) -> None:
        """The backend failed; its time says nothing about a working one."""
        self._end(Outcome.DROPPED)

    def ignored(self) -> None:
        """It ended for reasons that say nothing about the backend (the caller left)."""
        self._end(Outcome.IGNORED)

    def _end(self, outcome: Outcome) -> bool:
        if self._outcome is not None:
            return False
        self._outcome = outcome
        self._ended_at = self._clock()
        return True

    def _ended(self, unsaid: Outcome) -> tuple[Outcome, float, float]:
        """The outcome, the time held and the service time within it, seconds."""
        self._end(unsaid)
        held_s = self._ended_at - self.admitted_at
        return self._outcome or unsaid, held_s, held_s - self._queue_wait_s


class _Books:
    """What admission remembers of one backend. Backends are configured, so their number is bounded."""

    __slots__ = ("reservations", "service")

    def __init__(self) -> None:
        self.reservations = Reservations()
        self.service = ServiceTime()


class AdmissionController:
    """Gives out slots while a backend can take more, and tells why not otherwise.

    Args:
        limits: the thresholds.
        load: a backend's load as last told, by name; ``None`` when unknown. Must not block.
        clock: seconds, monotonic.
        emit: takes each event; must not block.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        load: Callable[[str], Load | None],
        clock: Callable[[], float],
        emit: Callable[[AdmissionEvent], None],
    ) -> None:
        self._limits = limits
        self._load = load
        self._clock = clock
        self._emit = emit
        self._books: dict[str, _Books] = {}

    def in_flight(self, backend: str) -> int:
        """Slots of ``backend`` that are out now."""
        books = self._books.get(backend)
        return len(books.reservations) if books else 0

    def admit(self, demand: Demand) -> AbstractAsyncContextManager[Slot]:
        """``async with admit(demand) as slot``: decides and reserves on entry, releases on exit.

        Entry raises :class:`Refused`. Entry and exit never wait, so no cancellation can fall between a
        decision and its reservation, nor between the end of the work and the release.
        """
        return _Admission(self, demand)

    def decide(self, demand: Demand, load: Load | None, now: float) -> Decision:
        """What to do with ``demand`` while the backend says ``load``; reserves nothing.

        Refusals, in the order of seed 000 §8, so that the first reason that holds is the one told:

        1. ``memory_pressure``: KV blocks in use and promised reach the threshold.
        2. ``token_budget_exceeded``: the prompt is longer than a backend should take.
        3. ``queue_full``: as many wait as may wait; priority above 0 has more room.
        4. ``wait_exceeded``: the estimated wait reaches the wait budget (priority above 0 has more), or
           ends after the request's own deadline.
        """
        limits = self._limits
        books = self._of(demand.backend)
        blocks = prompt_blocks(demand.input_tokens, load)
        state = standing(
            load,
            in_flight=len(books.reservations),
            unseen=books.reservations.unseen(load) if load is not None else Unseen(),
            blocks=blocks,
        )
        wait_s = estimate_wait_s(state.ahead, books.service.mean_s, state.capacity)
        factor = limits.priority_factor if demand.priority > 0 else 1.0

        reason: Reason | None = None
        if state.kv_usage >= limits.kv_pressure:
            reason = Reason.MEMORY_PRESSURE
        elif demand.input_tokens > limits.max_input_tokens:
            reason = Reason.TOKEN_BUDGET_EXCEEDED
        elif state.queue_depth >= limits.max_queue * factor:
            reason = Reason.QUEUE_FULL
        elif wait_s >= limits.max_wait_s * factor or (
            demand.deadline is not None and now + wait_s >= demand.deadline
        ):
            reason = Reason.WAIT_EXCEEDED
        again_s = retry_after_s(wait_s, turnover_s(books.service.mean_s, state.capacity))
        return Decision(reason, wait_s, again_s, state)

    def _of(self, backend: str) -> _Books:
        books = self._books.get(backend)
        if books is None:
            books = self._books[backend] = _Books()
        return books

    def _reserve(self, demand: Demand) -> tuple[Slot, int]:
        load = self._load(demand.backend)
        decision = self.decide(demand, load, self._clock())
        reservations = self._of(demand.backend).reservations
        state = decision.standing
        if decision.reason is not None:
            self._emit(
                RefusedEvent(
                    backend=demand.backend,
                    tenant=demand.tenant,
                    priority=demand.priority,
                    reason=decision.reason,
                    estimated_wait_s=decision.estimated_wait_s,
                    retry_after_s=decision.retry_after_s,
                    queue_depth=state.queue_depth,
                    kv_usage=state.kv_usage,
                    in_flight=len(reservations),
                )
            )
            raise Refused(
                decision.reason,
                estimated_wait_s=decision.estimated_wait_s,
                retry_after_s=decision.retry_after_s,
            )
        slot = Slot(demand, decision.estimated_wait_s, self._clock)
        ticket = reservations.reserve(load, prompt_blocks(demand.input_tokens, load))
        try:
            self._emit(
                Admitted(
                    backend=demand.backend,
                    tenant=demand.tenant,
                    priority=demand.priority,
                    estimated_wait_s=decision.estimated_wait_s,
                    queue_depth=state.queue_depth,
                    kv_usage=state.kv_usage,
                    in_flight=len(reservations),
                )
            )
        except BaseException:
            reservations.release(ticket)
            raise
        return slot, ticket

    def _release(self, slot: Slot, ticket: int, unsaid: Outcome) -> None:
        books = self._of(slot.backend)
        books.reservations.release(ticket)
        outcome, held_s, service_s = slot._ended(unsaid)
        if outcome is Outcome.SUCCEEDED:
            books.service.learn(service_s)
        self._emit(
            Released(
                backend=slot.backend,
                tenant=slot.demand.tenant,
                outcome=outcome,
                held_s=held_s,
                estimated_wait_s=slot.estimated_wait_s,
                in_flight=len(books.reservations),
            )
        )


class _Admission(AbstractAsyncContextManager[Slot]):
    """One pass through admission. Entered once: a slot belongs to one block of code."""

    __slots__ = ("_controller", "_demand", "_entered", "_held")

    def __init__(self, controller: AdmissionController, demand: Demand) -> None:
        self._controller = controller
        self._demand = demand
        self._entered = False
        self._held: tuple[Slot, int] | None = None

    async def __aenter__(self) -> Slot:
        if self._entered:
            raise RuntimeError("an admission is entered once; ask admit() for another")
        self._entered = True
        self._held = self._controller._reserve(self._demand)
        return self._held[0]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        # Exception: the work failed. Cancellation, and what else is no Exception, is nobody's failure.
        if error is None:
            unsaid = Outcome.SUCCEEDED
        elif isinstance(error, Exception):
            unsaid = Outcome.DROPPED
        else:
            unsaid = Outcome.IGNORED
        self._controller._release(*held, unsaid)
