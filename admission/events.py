"""Admission's events, for metrics, spans and logs."""

from enum import StrEnum

from msgspec import Struct

from admission.values import Reason


class SlotOutcome(StrEnum):
    """How a slot ended; only ``succeeded`` updates the estimates."""

    SUCCEEDED = "succeeded"
    DROPPED = "dropped"
    IGNORED = "ignored"


# As constants, for code that every request runs (``ticket``).
SUCCEEDED, DROPPED, IGNORED = SlotOutcome


class Admitted(Struct, frozen=True):
    """A request got a slot, which ``in_flight`` includes. ``shrunk``: a long queue has shortened the answer;
    ``beyond``: why the request was handed on although with it the memory forecast passes the watermark."""

    backend: str
    tenant: str
    priority: int
    estimated_wait_s: float
    queue_depth: int
    kv_usage: float
    in_flight: int
    waited_s: float = 0.0
    shrunk: bool = False
    beyond: str | None = None


class RefusedEvent(Struct, frozen=True):
    """A request was refused, with the figures of that moment; ``queued``: it waited in the queue before."""

    backend: str
    tenant: str
    priority: int
    reason: Reason
    estimated_wait_s: float
    retry_after_s: float
    queue_depth: int
    kv_usage: float
    in_flight: int
    queued: bool = False


class FirstToken(Struct, frozen=True):
    """The first token of an answer, ``took_s`` after the request's arrival; ``estimated_s`` was expected."""

    estimated_s: float
    took_s: float


AdmissionEvent = Admitted | RefusedEvent | FirstToken
