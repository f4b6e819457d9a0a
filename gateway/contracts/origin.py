"""What the edge knows of a request besides its body."""

from dataclasses import dataclass, field

from msgspec import Struct

from accounting.keys import HIGHEST_PRIORITY, KeyRecord
from gateway.errors import PublicError


@dataclass(frozen=True, slots=True)
class Caller(KeyRecord):
    """The caller of a request: derived from the key, never from the body.

    ``by_front``: whether another Sluice, which bills the requests, named ``tenant`` and ``org``. Only
    requests with the same ``cache_salt``, by default the tenant, share cached prefixes.
    """

    max_priority: int = HIGHEST_PRIORITY
    by_front: bool = False
    own_salt: str | None = None
    cache_salt: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_salt", self.own_salt or self.tenant)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class EdgeRequest(Struct, eq=False, kw_only=True):
    """A request at the edge, and its outcome so far.

    Args:
        arrived_at: seconds on the injected clock.
        method: the HTTP method, or ``WS``.
        path: the path's label, never the path as it was sent.
        contract: the contract of a path whose requests are counted; ``None`` for all others.
        caller: ``None`` without a valid key.
        status: the status that was sent; ``None`` if the caller disconnected before.
        replayed: whether the answer was a stored one.
    """

    request_id: str
    trace_id: str
    arrived_at: float
    method: str
    trace_parent: str | None = None
    trace_state: str | None = None
    path: str = ""
    contract: str | None = None
    caller: Caller | None = None
    status: int | None = None
    error: PublicError | None = None
    replayed: bool = False


class RequestOrigin(Struct, frozen=True):
    """What every contract needs besides the body's fields.

    Args:
        request_id: the caller's label, or one that the gateway made.
        generation_id: the gateway's own id; the key of the request's ledger row.
        arrived_at: seconds on the injected clock; ``created`` is Unix time.
        trace_id: 32 hex digits, reported to the caller: from its trace context, or made at the edge.
        trace_parent, trace_state: the caller's W3C trace context, if it sent a valid one.
        session_id: requests of one session share a prefix and go to one worker; coding agents send a header.
        is_auxiliary: a coding agent's work, such as a conversation's title, that comes last.
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

    def capped(self, asked: int) -> int:
        """A requested priority, capped without an error by what the key allows.

        Auxiliary requests have at most the lowest priority, because nobody waits for them.
        """
        return min(asked, self.caller.max_priority, -1 if self.is_auxiliary else 1)
