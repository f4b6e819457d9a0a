"""A whole journey of production stages around a scripted backend, a recording sink and a list as ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from accounting.values import UsageRow
from adapters.registry import AdapterRegistry
from admission.controller import AdmissionController
from gateway.backends.port import Delta
from gateway.backends.scripted import ScriptedBackend
from gateway.contracts.values import Answer, Caller, CallerRole, GenerateRequest
from gateway.errors import PublicError
from gateway.journey import Journey
from gateway.reception import Reception
from observability.events import RequestRecord

CALLER = Caller("acme", CallerRole.CALLER, "key_1")


@dataclass
class RecordingSink:
    """Keeps what it is given; each send lets the loop turn, so that it can be cancelled there."""

    deltas: list[Delta] = field(default_factory=list)
    answer: Answer | None = None
    error: PublicError | None = None

    async def delta(self, delta: Delta) -> None:
        await asyncio.sleep(0)
        self.deltas.append(delta)

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

    def append(self, row: UsageRow) -> bool:
        self.rows.append(row)
        return True


@dataclass
class House:
    """A journey and what it might leave behind."""

    journey: Journey
    backends: Mapping[str, ScriptedBackend]
    admission: AdmissionController
    adapters: AdapterRegistry
    reception: Reception
    outbox: Outbox
    records: list[RequestRecord]

    async def run(self, request: GenerateRequest) -> RecordingSink:
        sink = RecordingSink()
        await self.journey.run(request, sink)
        return sink

    def left_behind(self) -> list[str]:
        """Everything that an ended request must not leave."""
        left = []
        if self.reception.in_flight:
            left.append("a place at the reception")
        for name, backend in self.backends.items():
            if self.admission.in_flight(name):
                left.append(f"a slot of {name}")
            if backend.active:
                left.append(f"a generation on {name}")
        if self.adapters.leased():
            left.append("an adapter lease")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        left.extend(f"task {task.get_name()}" for task in others)
        return left
