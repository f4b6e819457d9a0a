"""A trace's facts beyond the request's record; built only for sampled traces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFact:
    """One call of a backend to a server of its own.

    Args:
        target: the server.
        number: number within the trace; the span's id is derived from it.
        began_ms: since the request's arrival.
        took_ms: until its end.
        failure: how it failed; ``None`` when it did not.
        hedge: whether it was sent because another call was late.
    """

    target: str
    number: int
    began_ms: float
    took_ms: float
    failure: str | None = None
    hedge: bool = False


@dataclass(frozen=True, slots=True)
class StepFact:
    """One step towards an answer: an attempt, a fallback target, a wait for an engine.

    Args:
        name: ``attempt``, ``refused``, ``wait``, ``response_cache``, ``degraded``.
        number: as in :class:`CallFact`.
        began_ms: since the request's arrival.
        took_ms: until its end.
        backend: that was asked.
        failure: a failure kind, or admission's reason; ``None`` when it succeeded.
        attempt: counts from 1 on each backend.
        mode: how it resumed a partial answer; ``None`` for a new one.
        waited_ms: between the attempt before it and this one.
        calls: to servers.
    """

    name: str
    number: int
    began_ms: float
    took_ms: float
    backend: str | None = None
    failure: str | None = None
    attempt: int | None = None
    mode: str | None = None
    waited_ms: float | None = None
    calls: tuple[CallFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """The recorded text, of routes that opted in: roles with texts, and the answer."""

    messages: tuple[tuple[str, str], ...]
    output: str


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts of one request for its spans alone.

    Args:
        steps: in order of their beginning.
        admission: ``admitted``, ``shortened`` (with fewer tokens), ``refused``; ``None``: not reached.
        admission_reason: why it was refused.
        max_tokens: as requested, like the next ones; ``None``: not set.
        choices: number of requested answers.
        content: ``None`` unless the route opted in.
    """

    steps: tuple[StepFact, ...] = ()
    admission: str | None = None
    admission_reason: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    choices: int = 1
    content: Content | None = None


NO_FACTS = TraceFacts()


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    """An HTTP answer without a generation: lists, counts, operators' calls, unknown paths.

    Args:
        request_id: the caller's label.
        trace_id: 32 hex digits.
        method: the HTTP method; ``WS`` for a WebSocket.
        path: the path as the gateway knows it, never as it was sent.
        status: the sent status; 499 when the caller disconnected before.
        total_ms: from arrival to the end.
        error_code: a stable code.
    """

    request_id: str
    trace_id: str
    method: str
    path: str
    status: int
    total_ms: float
    error_code: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the gateway is at fault."""
        return self.status >= 500
