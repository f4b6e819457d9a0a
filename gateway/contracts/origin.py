"""What the edge knows of a request besides its body."""

from dataclasses import dataclass

from gateway.contracts.values import Caller


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Where a request comes from; every contract adds it to what the body says.

    Args:
        request_id: the label to use when the body has none.
        generation_id: the gateway's own id of the generation.
        caller: who asks, from the key.
        arrived_at: seconds on the injected clock.
        created: Unix time, whole seconds.
        trace_id: 32 hex digits; the caller's trace when it sent one.
        trace_parent: the caller's W3C ``traceparent``, if it sent a valid one.
        trace_state: the ``tracestate`` sent with it.
        allow_fallback: false when the caller asked for an error instead of a fallback.
        max_messages: most messages that a request may have.
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

    def priority(self, asked: int) -> int:
        """The asked priority, capped by what the key allows (silently, as the contract says)."""
        return min(asked, self.caller.max_priority)

    def deadline(self, deadline_ms: int | None) -> float | None:
        """The deadline on the injected clock; it counts from arrival."""
        return None if deadline_ms is None else self.arrived_at + deadline_ms / 1000
