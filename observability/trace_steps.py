"""The steps of one request towards its answer, for its trace: attempts, waits, stored answers, worker calls.

Steps are added where they happen, and only the trace reads them. A step is a ``with`` block, so it ends
however the block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from msgspec import Struct

from admission.errors import Refused
from observability.trace_context import RootSpan
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure

# The most recorded steps of a request (a fallback chain has about ten), and calls of a step (a pool makes at
# most 16).
MAX_STEPS = 64
MAX_CALLS = 32


class _Timed(Struct, eq=False, kw_only=True):
    """A step or a call: its start since the request's arrival, its length, and perhaps a failure.

    ``number``, unique in the request, gives the span's id. ``steps`` are all steps of the request; ``None``
    once this one has ended.
    """

    number: int
    began_ms: float
    took_ms: float = 0.0
    failure: str | None = None
    steps: TraceSteps | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if (steps := self.steps) is not None:
            self.took_ms = (steps.clock() - steps.arrived_at) * 1000 - self.began_ms
            self.steps = None  # ends a reference cycle
        if error is not None:
            self.failure = failure_name(error)


class CallSpan(_Timed):
    """One call to a worker; a ``hedge`` was sent because another call was late."""

    target: str
    hedge: bool = False

    @property
    def headers(self) -> bytes:
        """The trace context for the worker, as header lines; the parent span is this call."""
        root = None if self.steps is None else self.steps.root
        return b"" if root is None else root.headers(self.number)


class TraceStep(_Timed):
    """One step: ``attempt``, ``refused``, ``wait``, ``response_cache`` or ``degraded``.

    ``failure`` is a failure kind or admission's reason, ``attempt`` counts from 1 on each backend, ``mode``
    is that of a resumption, ``waited_ms`` is the time since the attempt before. ``call`` opens a call.
    """

    name: str
    backend: str | None = None
    attempt: int | None = None
    mode: str | None = None
    waited_ms: float | None = None
    calls: list[CallSpan] = []

    def call(self, target: str, *, hedge: bool = False) -> CallSpan:
        """Open a call to ``target`` that starts now."""
        steps = self.steps
        if steps is None:
            raise RuntimeError("a call is opened after its step has ended")
        steps.number += 1
        began_ms = (steps.clock() - steps.arrived_at) * 1000
        call = CallSpan(target, hedge, steps=steps, number=steps.number, began_ms=began_ms)
        if len(self.calls) < MAX_CALLS:
            self.calls.append(call)
        return call


class TraceSteps(Struct, eq=False):
    """All steps of one request.

    Attributes:
        root: the request's root span; ``None`` without a trace.
        shortened: whether admission lowered ``max_tokens``.
        number: the number of the latest step or call.
    """

    clock: Callable[[], float]
    arrived_at: float
    root: RootSpan | None = None
    shortened: bool = False
    number: int = 0
    _steps: list[TraceStep] = []

    def step(self, name: str, backend: str | None = None, attempt: int | None = None) -> TraceStep:
        self.number += 1
        began_ms = (self.clock() - self.arrived_at) * 1000
        step = TraceStep(name, backend, attempt, steps=self, number=self.number, began_ms=began_ms)
        if len(self._steps) < MAX_STEPS:
            self._steps.append(step)
        return step

    def refused(self, backend: str, reason: str) -> None:
        """Add a refusal of the request for ``backend``, by admission or a limit of a fallback target."""
        step = self.step("refused", backend)
        step.failure, step.steps = reason, None

    def up_to_now(self) -> tuple[TraceStep, ...]:
        """The steps with their waits; those that have not ended last until now."""
        now_ms = (self.clock() - self.arrived_at) * 1000
        attempt_ended_ms: dict[str, float] = {}
        for step in self._steps:
            for one in (step, *step.calls):
                if one.steps is not None:
                    one.took_ms = now_ms - one.began_ms
            if step.name == "attempt" and step.backend is not None:
                before_ms = attempt_ended_ms.get(step.backend)
                if before_ms is not None:
                    step.waited_ms = max(0.0, step.began_ms - before_ms)
                attempt_ended_ms[step.backend] = step.began_ms + step.took_ms
        return tuple(self._steps)


def failure_name(error: BaseException) -> str:
    """Return a stable code for the error that ended a step."""
    if isinstance(error, BackendFailure):
        return error.kind.value
    if isinstance(error, Refused):
        return error.reason.value
    if isinstance(error, DeadlinePassed):
        return "deadline_exceeded"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
