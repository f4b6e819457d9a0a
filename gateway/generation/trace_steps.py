"""The steps of one request towards its answer, for its trace: attempts, waits, stored answers, worker calls.

Steps are added where they happen, and only the trace reads them. A step is a ``with`` block, so it ends
however the block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from msgspec import Struct

from admission.errors import Refused
from observability.trace_context import RootSpan
from observability.trace_facts import CallFact, StepFact
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure

# The most recorded steps of a request (a fallback chain has about ten), and calls of a step (a pool makes at
# most 16).
MAX_STEPS = 64
MAX_CALLS = 32


class _Timed(Struct, eq=False, kw_only=True):
    """A step or a call, with a start, an end and perhaps a failure; its ``number`` is unique in the request.
    ``steps`` are all steps of the request; ``None`` once this one has ended.
    """

    steps: TraceSteps | None
    number: int
    began_at: float
    ended_at: float | None = None
    failure: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.steps is not None:
            self.ended_at, self.steps = self.steps.clock(), None  # ends a reference cycle
        if error is not None:
            self.failure = failure_name(error)

    def _times(self, arrived_at: float, now: float) -> tuple[float, float]:
        ended_at = now if self.ended_at is None else self.ended_at
        return (self.began_at - arrived_at) * 1000, (ended_at - self.began_at) * 1000


class CallSpan(_Timed):
    """One call to a worker."""

    target: str
    hedge: bool

    @property
    def headers(self) -> bytes:
        """The trace context for the worker, as header lines; the parent span is this call."""
        root = None if self.steps is None else self.steps.root
        return b"" if root is None else root.headers(self.number)

    def fact(self, arrived_at: float, now: float) -> CallFact:
        return CallFact(self.target, self.number, *self._times(arrived_at, now), self.failure, self.hedge)


class TraceStep(_Timed):
    """One step; ``call`` opens a call within it."""

    name: str
    backend: str | None = None
    attempt: int | None = None
    mode: str | None = None
    calls: list[CallSpan] = []

    def call(self, target: str, *, hedge: bool = False) -> CallSpan:
        """Open a call to ``target`` that starts now."""
        steps = self.steps
        if steps is None:
            raise RuntimeError("a call is opened after its step has ended")
        steps.number += 1
        call = CallSpan(target, hedge, steps=steps, number=steps.number, began_at=steps.clock())
        if len(self.calls) < MAX_CALLS:
            self.calls.append(call)
        return call

    def fact(self, arrived_at: float, now: float, waited_ms: float | None) -> StepFact:
        return StepFact(
            self.name,
            self.number,
            *self._times(arrived_at, now),
            self.backend,
            self.failure,
            self.attempt,
            self.mode,
            waited_ms,
            tuple([call.fact(arrived_at, now) for call in self.calls]),
        )


class TraceSteps(Struct, eq=False):
    """All steps of one request.

    Attributes:
        root: the request's root span; ``None`` without a trace.
        shortened: whether admission lowered ``max_tokens``.
        number: the number of the latest step or call.
    """

    clock: Callable[[], float]
    root: RootSpan | None = None
    shortened: bool = False
    number: int = 0
    _steps: list[TraceStep] = []

    def step(self, name: str, backend: str | None = None, attempt: int | None = None) -> TraceStep:
        self.number += 1
        step = TraceStep(name, backend, attempt, steps=self, number=self.number, began_at=self.clock())
        if len(self._steps) < MAX_STEPS:
            self._steps.append(step)
        return step

    def refused(self, backend: str, reason: str) -> None:
        """Add a refusal of the request for ``backend``, by admission or a limit of a fallback target."""
        step = self.step("refused", backend)
        step.failure, step.ended_at, step.steps = reason, step.began_at, None

    def facts(self, arrived_at: float) -> tuple[StepFact, ...]:
        now = self.clock()
        facts = []
        attempt_ended_at: dict[str, float] = {}
        for step in self._steps:
            waited_ms = None
            if step.name == "attempt" and step.backend is not None:
                before = attempt_ended_at.get(step.backend)
                if before is not None:
                    waited_ms = max(0.0, (step.began_at - before) * 1000)
                attempt_ended_at[step.backend] = now if step.ended_at is None else step.ended_at
            facts.append(step.fact(arrived_at, now, waited_ms))
        return tuple(facts)


def failure_name(error: BaseException) -> str:
    """Return a stable code for the error that ended a step."""
    if isinstance(error, BackendFailure):
        return error.kind.value
    if isinstance(error, Refused):
        return error.reason.value
    if isinstance(error, DeadlinePassed):
        return "deadline_exceeded"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
