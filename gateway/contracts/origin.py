"""What the edge knows of a request besides its body, and the outcome of one that it answered itself."""

from dataclasses import dataclass

from msgspec import Struct

from gateway.contracts.values import Caller
from gateway.errors import PublicError


@dataclass(frozen=True, slots=True)
class EdgeOutcome:
    """The outcome of a request that no journey reports.

    Args:
        method: the HTTP method, or ``WS``.
        path: the path's label, never the path as it was sent.
        contract: the contract of a path that generates; ``None`` for all others.
        tenant: ``None`` without a valid key.
        status: the status that was sent; ``None`` if the caller disconnected before.
        replayed: whether the answer was a stored one.
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
    """What every contract needs besides the body's fields.

    ``request_id`` is for bodies without one. ``arrived_at`` is on the injected clock, ``created`` is Unix
    time. ``session_id`` and ``is_auxiliary`` come from coding agents' headers: requests of one session
    share a prefix and go to one worker, and auxiliary work, such as a conversation's title, comes last.
    """

    request_id: str
    generation_id: str
    caller: Caller
    arrived_at: float
    created: int
    trace_id: str | None = None
    trace_parent: str | None = None
    trace_state: str | None = None
    allow_fallback: bool = True
    max_messages: int = 2_048
    session_id: str | None = None
    is_auxiliary: bool = False

    def priority(self, asked: int) -> int:
        """The requested priority, capped without an error by what the key allows.

        Auxiliary requests have at most the lowest priority, because nobody waits for them.
        """
        return min(asked, self.caller.max_priority, -1 if self.is_auxiliary else 1)

    def deadline(self, deadline_ms: int | None) -> float | None:
        """The deadline in seconds on the injected clock; ``deadline_ms`` counts from the arrival."""
        return None if deadline_ms is None else self.arrived_at + deadline_ms / 1000
