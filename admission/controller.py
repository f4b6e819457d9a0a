"""Admission as the journey uses it: ``async with admit(demand) as slot``."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from random import Random

from msgspec import Struct

from admission.events import DROPPED, IGNORED, SUCCEEDED, AdmissionEvent
from admission.gate import BackendGate
from admission.queue import AdmissionQueue, Slot
from admission.values import AdmissionLimits, BackendLoad, Demand


@dataclass(slots=True, eq=False)
class AdmissionController:
    """Gives out slots in queue order, as far as the backends have room; refuses other requests with a reason.

    Args:
        load: returns the last reported load of the named backend; ``None`` when unknown. Must not block.
        emit: takes each event; must not block.
        engine_of: the engine of each backend that shares one; backends on the same engine share one gate.
        hosted: whether the named backend is a service of many engines, where no prompt waits for another one.
    """

    limits: AdmissionLimits
    _: KW_ONLY
    load: Callable[[str], BackendLoad | None]
    clock: Callable[[], float]
    emit: Callable[[AdmissionEvent], None]
    random: Random
    engine_of: Mapping[str, str] = field(default_factory=dict)
    hosted: Callable[[str], bool] = lambda backend: False
    _queues: dict[str, AdmissionQueue] = field(default_factory=dict)

    def admit(self, demand: Demand) -> AbstractAsyncContextManager[Slot]:
        """``async with admit(demand) as slot``: waits in the queue on entry, gives the slot back on exit.

        Entry raises :class:`Refused`. A cancelled request leaves the queue, or gives its slot back, at once.
        """
        backend = demand.backend
        queue = self._queues.get(self.engine_of.get(backend, backend))
        return _Admission(self._queue(backend) if queue is None else queue, demand)

    def wake(self, backend: str) -> None:
        """Read the load of a backend that has run a step, and hand on queued requests if possible."""
        queue = self._queues.get(self.engine_of.get(backend, backend))
        if queue is not None:
            queue.stepped()

    def scale(self, backend: str, factor: float) -> None:
        """Use only ``factor`` of the sequences and blocks of ``backend``'s engine from now on.

        Requests already handed on stay; an idle backend always takes one. ``factor`` is above 0, at most 1.
        """
        queue = self._queue(backend)
        queue.gate.work.scale = factor
        if queue.gate.queued:
            queue.look()

    def gate_name(self, backend: str) -> str:
        """The name of the gate that ``backend``'s requests pass: its engine's, or its own."""
        return self.engine_of.get(backend, backend)

    def expected_output(self, demand: Demand) -> int:
        """Tokens to plan for the answer: its bound, or the learned length where the request sets no bound."""
        if not demand.open_ended:
            return demand.max_output_tokens
        return self.gate(demand.backend).work.estimator.expect(demand, demand.max_output_tokens)

    def gate(self, backend: str) -> BackendGate:
        """The gate of one backend, for display."""
        return self._queue(backend).gate

    def keep(self, backends: Iterable[str]) -> None:
        """Drop the gates of other backends, unless a request waits or runs there."""
        for name in self._queues.keys() - set(map(self.gate_name, backends)):
            gate = self._queues[name].gate
            if not gate.tickets and not gate.in_flight:
                del self._queues[name]

    @property
    def gates(self) -> Mapping[str, BackendGate]:
        """The gates that have had a request, by name of the shared engine, else of the backend.

        Each has its backend's current load: no request reads it while none comes.
        """
        for queue in self._queues.values():
            queue.listen(queue.clock())
        return {name: queue.gate for name, queue in self._queues.items()}

    def _queue(self, backend: str) -> AdmissionQueue:
        # The number of gates is bounded by that of the backends: `keep` drops that of a removed one.
        engine = self.gate_name(backend)
        queue = self._queues.get(engine)
        if queue is None:
            queue = self._queues[engine] = AdmissionQueue(
                BackendGate(self.limits, random=self.random, hosted=self.hosted(backend)),
                load=partial(self.load, backend),
                clock=self.clock,
                emit=self.emit,
            )
        return queue


class _Admission(Struct, eq=False):
    """One request's wait for a slot, and its use."""

    _queue: AdmissionQueue
    _demand: Demand
    _slot: Slot | None = None

    async def __aenter__(self) -> Slot:
        demand = self._demand
        del self._demand  # an admission is entered once
        self._slot = slot = await self._queue.enter(demand)
        return slot

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        slot, queue = self._slot, self._queue
        assert slot is not None, "it was entered"
        if slot.ended is None:
            if error is None:
                outcome = SUCCEEDED
            elif isinstance(error, Exception):
                outcome = DROPPED
            else:
                outcome = IGNORED  # a cancellation is no failure of the backend
            slot.ended = outcome, queue.clock()
        outcome, ended_at = slot.ended
        ticket, gate = slot.ticket, queue.gate
        gate.release(ticket, outcome, ended_at, output_tokens=ticket.demand.produced())
        if gate.tickets:
            queue.look()
