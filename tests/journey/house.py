"""A whole journey of production stages around a scripted backend, a recording sink and a list as ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accounting.values import UsageRow
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from budgeting.values import Plan
from gateway.backends.port import Absence, BackendState, Completion, DeltaSink, Work
from gateway.backends.scripted import ScriptedBackend
from gateway.contracts.events import Delta
from gateway.contracts.values import Answer, Caller, CallerRole, GenerateRequest
from gateway.errors import PublicError
from gateway.journey import Journey
from gateway.requests.in_flight import InFlightRequests
from observability.events import RequestRecord
from resilience.events import ResilienceEvent
from resilience.failures import BackendFailure, FailureKind
from resilience.leg_limits import LegLimits, LegSkipped
from resilience.response_cache import ResponseCache

CALLER = Caller("acme", CallerRole.CALLER, "key_1")


@dataclass
class RecordingSink:
    """Keeps what it is given; each send lets the loop turn, so that it can be cancelled there."""

    deltas: list[Delta] = field(default_factory=list)
    answer: Answer | None = None
    error: PublicError | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    plans: list[Plan] = field(default_factory=list)

    def planned(self, plan: Plan, model: str) -> None:
        self.plans.append(plan)

    async def delta(self, delta: Delta) -> None:
        await asyncio.sleep(0)
        self.deltas.append(delta)
        self.heard.set()

    async def finish(self, answer: Answer) -> None:
        await asyncio.sleep(0)
        assert self.answer is None and self.error is None
        self.answer = answer

    async def fail(self, error: PublicError, *, request_id: str, trace_id: str) -> None:
        await asyncio.sleep(0)
        assert self.answer is None and self.error is None
        assert len(trace_id) == 32
        self.error = error

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@dataclass
class Outbox:
    """A ledger that is a list."""

    rows: list[UsageRow] = field(default_factory=list)

    accepts = True

    def append(self, row: UsageRow) -> bool:
        self.rows.append(row)
        return True

    async def durable(self) -> bool:
        return True


@dataclass
class House:
    """A journey and what it might leave behind."""

    journey: Journey
    backends: Mapping[str, ScriptedBackend]
    admission: AdmissionController
    adapters: AdapterRegistry
    in_flight: InFlightRequests
    outbox: Outbox
    records: list[RequestRecord]
    events: list[ResilienceEvent]
    cache: ResponseCache
    limits: LegLimits
    skipped: list[LegSkipped]

    async def run(self, request: GenerateRequest) -> RecordingSink:
        sink = RecordingSink()
        await self.journey.run(request, sink)
        await self.cache.flush()
        return sink

    def left_behind(self) -> list[str]:
        """Everything that an ended request must not leave."""
        left = []
        if self.in_flight.in_flight:
            left.append("a request in flight")
        for name, backend in self.backends.items():
            if self.admission.in_flight(name):
                left.append(f"a slot of {name}")
            if backend.active:
                left.append(f"a generation on {name}")
        if any(leg.in_use or leg.reserved_nanousd for leg in self.limits.figures().values()):
            left.append("a place in a leg")
        if self.adapters.leased():
            left.append("an adapter lease")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        left.extend(f"task {task.get_name()}" for task in others)
        return left


class Spelled:
    """Token ids for scripted pieces: each piece has one, and so has each byte."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = [piece.encode() for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < len(self._pieces):
            return self._pieces[token_id]
        return bytes([token_id - len(self._pieces)])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        data, ids = text.encode(), list[int]()
        while data:
            fits = [i for i, piece in enumerate(self._pieces) if piece and data.startswith(piece)]
            ids.append(fits[0] if fits else len(self._pieces) + data[0])
            data = data[len(self.token_bytes(ids[-1])) :]
        return tuple(ids)


class RestartingBackend(ScriptedBackend):
    """Its engine dies with a failure of kind ``engine_dead``, and is back after ``restart_s``.

    ``None``: it never comes back. What breaks later and had begun on the dead one is no death of the next.
    With ``together`` its first calls begin when they are so many.
    """

    restart_s: float | None = 0.01
    ready_in_s: float | None = None
    waited_for: asyncio.Event
    together: asyncio.Barrier | None = None
    deaths = 0

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        before = self.deaths
        if self.together is not None and not self.calls:
            await self.together.wait()
        try:
            return await super().generate(work, out)
        except BackendFailure as failure:
            if failure.kind is FailureKind.ENGINE_DEAD and before == self.deaths:
                self.deaths += 1
                self.state = BackendState.DEAD if self.restart_s is None else BackendState.STARTING
                self.ready_in_s = self.restart_s
            raise

    loading = False

    @property
    def absence(self) -> Absence:
        return Absence(f"the engine of {self.name} is away", self.loading)

    async def wait_ready(self, timeout_s: float) -> bool:
        self.waited_for.set()
        if self.state is BackendState.STARTING and self.restart_s is not None:
            await asyncio.sleep(min(self.restart_s, timeout_s))
            if self.restart_s <= timeout_s:
                self.state, self.ready_in_s = BackendState.READY, None
        return self.state is BackendState.READY
