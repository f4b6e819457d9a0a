"""Admission's events, for metrics, spans and logs."""

from enum import StrEnum

from msgspec import Struct

from admission.values import Reason


class SlotOutcome(StrEnum):
    """How a slot ended; only ``succeeded`` updates the estimates."""

    SUCCEEDED = "succeeded"
    DROPPED = "dropped"
    IGNORED = "ignored"


class Admitted(Struct, frozen=True):
    """A slot was given; ``in_flight`` counts it. ``shrunk``: a long queue has shortened the answer;
    ``beyond``: why it was handed on although the memory forecast passes the watermark with it."""

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
    """A request was refused, after waiting in the queue when ``queued``; figures of that moment."""

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
    """An answer has its first token, ``took_s`` after the offer; the estimate was ``estimated_s``."""

    backend: str
    estimated_s: float
    took_s: float


AdmissionEvent = Admitted | RefusedEvent | FirstToken
