"""The record of a request that the HTTP edge refused, or served without the journey."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.contracts.origin import EdgeOutcome
from gateway.requests.request_record import CLIENT_CLOSED_REQUEST
from observability.events import RequestRecord
from observability.trace_facts import EdgeRecord
from observability.tracing import Tracing


@dataclass(frozen=True, slots=True)
class EdgeReporter:
    """Makes a root span and a record of each such request; ``emit`` takes the records."""

    tracing: Tracing
    emit: Callable[[RequestRecord | EdgeRecord], None]
    clock: Callable[[], float]

    def report(self, outcome: EdgeOutcome) -> None:
        """Report a request that has ended."""
        took_s = max(0.0, self.clock() - outcome.arrived_at)
        root = self.tracing.begin(
            outcome.trace_parent, trace_id=outcome.trace_id, trace_state=outcome.trace_state, ago_s=took_s
        )
        record = _record(outcome, root.trace_id, took_s * 1000)
        self.tracing.finish(root, record)
        self.emit(record)


def _record(outcome: EdgeOutcome, trace_id: str, total_ms: float) -> RequestRecord | EdgeRecord:
    gone, error = outcome.status is None, outcome.error
    status = CLIENT_CLOSED_REQUEST if outcome.status is None else outcome.status
    details: dict[str, Any] = {"error_code": "cancelled"} if gone else {}
    if error is not None and not gone:
        details = {"error_code": error.code, "error_param": error.param, "error_message": error.message}
    if outcome.contract is None:
        return EdgeRecord(
            outcome.request_id, trace_id, outcome.method, outcome.path, status, total_ms, **details
        )
    return RequestRecord(
        request_id=outcome.request_id,
        generation_id="",
        trace_id=trace_id,
        tenant=outcome.tenant,
        contract=outcome.contract,
        status=status,
        total_ms=total_ms,
        finish_reason="replay" if outcome.replayed else "cancelled" if gone else "error",
        **details,
    )
