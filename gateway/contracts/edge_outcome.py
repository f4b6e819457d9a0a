"""How a request that never reached the journey ended."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EdgeOutcome:
    """What became of a request that had no journey.

    Args:
        request_id, trace_id: as reported to the caller.
        trace_parent, trace_state: the caller's trace context, if it sent a valid one.
        arrived_at: seconds on the injected clock.
        method: HTTP's, or ``WS``.
        path: the path as the gateway knows it, never as it was sent.
        contract: of paths that generate; ``None`` for all others.
        tenant: who asked, once that was known.
        status: what went out; ``None``: the caller left before.
        error_code: a stable code.
        replayed: whether it was a stored answer, given again.
    """

    request_id: str
    trace_id: str
    trace_parent: str | None
    trace_state: str | None
    arrived_at: float
    method: str
    path: str
    contract: str | None
    tenant: str | None
    status: int | None
    error_code: str | None
    replayed: bool = False
