"""What admission tells: frozen facts for metrics, spans and logs; admission itself knows none of those."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from admission.values import Reason


class SlotOutcome(StrEnum):
    """How a slot ended; only ``succeeded`` teaches the service time."""

    SUCCEEDED = "succeeded"
    DROPPED = "dropped"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A slot was given.

    ``queue_depth`` and ``kv_usage`` are what the decision saw; ``in_flight`` counts the new slot;
    ``waited_s`` is its time in the line, ``shrunk`` whether a long line has shortened its answer, ``beyond``
    why it was handed on although the memory forecast passes the watermark with it.
    """

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


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """A request was kept from its backend, after waiting in line when ``queued``; figures as then seen."""

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


@dataclass(frozen=True, slots=True)
class Released:
    """A slot came back. ``held_s`` is the time from admission until its outcome was known, seconds."""

    backend: str
    tenant: str
    outcome: SlotOutcome
    held_s: float
    estimated_wait_s: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first piece of an answer is there, ``took_s`` after the offer, which foresaw ``estimated_s``."""

    backend: str
    estimated_s: float
    took_s: float


AdmissionEvent = Admitted | RefusedEvent | FirstToken | Released
