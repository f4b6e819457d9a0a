"""When the base model may answer in an adapter's place."""

from __future__ import annotations

from dataclasses import replace

from adapters.selection import Lease
from admission.errors import Refused
from gateway.backends.lora_slots import PARAM
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from resilience.failures import BackendFailure

RULE = "base"


def without_adapter(cause: Refused | BackendFailure, job: Job, stream: AnswerStream) -> Job | None:
    """The same job for the base model; ``None`` where that is not allowed, or not what failed.

    The route must allow it (``adapter_fallback: base``). The caller must accept fallbacks, and must have
    nothing of the adapter's answer.
    """
    if not isinstance(cause, BackendFailure) or cause.param != PARAM or job.lease.adapter is None:
        return None
    if not job.target.route.adapter_fallback or not job.request.allow_fallback or stream.committed:
        return None
    return replace(job, lease=Lease(None, RULE))


def warning_of(job: Job, cause: Refused | BackendFailure) -> str:
    """The warning for the caller."""
    adapter = job.lease.adapter
    name = adapter.adapter_id if adapter is not None else "none"
    reason = cause.kind.value if isinstance(cause, BackendFailure) else cause.reason.value
    return f"adapter {name} could not be used ({reason}); the base model answered"
