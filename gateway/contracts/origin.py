"""What the edge knows of a request besides its body, and the outcome of one that it answered itself."""

from dataclasses import dataclass

from msgspec import Struct

from gateway.contracts.values import Caller
from gateway.errors import PublicError


@dataclass(frozen=True, slots=True)
class EdgeOutcome:
    """What became of a request that had no journey.

    Args:
        method: HTTP's, or ``WS``.
        path: the path as the gateway knows it, never as it was sent.
        contract: of paths that generate; ``None`` for all others.
        tenant: ``None`` without a valid key.
        status: what was sent; ``None``: the caller left before.
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
    error: PublicError | None
    replayed: bool = False


class RequestOrigin(Struct, frozen=True):
    """What every contract adds to the fields of the body.

    ``request_id`` is for bodies without one; ``arrived_at`` is on the injected clock, ``created`` Unix time.
    ``session_id`` and ``auxiliary`` are from headers of agents.
    """

    request_id: str
    generation_id: str
    caller: Caller
    arrived_at: float
    created: int
    trace_id: str
    trace_parent: str | None = None
    trace_state: str | None = None
    allow_fallback: bool = True
    max_messages: int = 2_048
    session_id: str | None = None
    auxiliary: bool = False

    def priority(self, asked: int) -> int:
        """The asked priority, capped by what the key allows (silently, as the contract says).

        Auxiliary requests are the lowest: nobody waits for them.
        """
        return min(asked, self.caller.max_priority, -1 if self.auxiliary else 1)

    def deadline(self, deadline_ms: int | None) -> float | None:
        """The deadline on the injected clock; it counts from arrival."""
        return None if deadline_ms is None else self.arrived_at + deadline_ms / 1000
