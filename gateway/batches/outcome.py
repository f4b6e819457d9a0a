"""The outcome of a line, and its record in the result files."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from accounting.batch_tables import BatchLine
from accounting.values import UsageRow


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """The outcome of one try of a line.

    Args:
        body: the body of the answer or the error, in the contract's form.
        usage: its bill; ``None`` when nothing is billed.
        retry_s: the line was refused for now: seconds until it runs again. ``None``: it was not refused.
        engine_died: the engine that ran it has died; another try may succeed.
        failed_here: the fault is the backend's, so another try may succeed.
    """

    status: int
    body: bytes
    usage: UsageRow | None = None
    retry_s: float | None = None
    engine_died: bool = False
    failed_here: bool = False


def at_fault(reason: str) -> LineOutcome:
    """The outcome of a line that is not tried again, because of ``reason``."""
    error = {"message": f"{reason}; it is not tried again", "type": "server_error", "code": "line_failed"}
    return LineOutcome(500, orjson.dumps({"error": error}))


def output_line(line: BatchLine, outcome: LineOutcome) -> bytes:
    return _record(line.batch_id, line.number, line.custom_id, outcome=outcome)


def unrun_line(batch_id: str, number: int, custom_id: str, ending: str) -> bytes:
    """The error file's record of a line that was not run before its batch expired or was cancelled."""
    if ending == "expired":
        error = {"code": "batch_expired", "message": "the batch expired before this line was run"}
    else:
        error = {"code": "batch_cancelled", "message": "the batch was cancelled before this line was run"}
    return _record(batch_id, number, custom_id, error=error)


def _record(
    batch_id: str,
    number: int,
    custom_id: str,
    *,
    outcome: LineOutcome | None = None,
    error: Mapping[str, str] | None = None,
) -> bytes:
    request_id, response = f"batch_req_{batch_id.removeprefix('batch_')}_{number}", None
    if outcome is not None:
        body = orjson.Fragment(outcome.body)
        response = {"status_code": outcome.status, "request_id": request_id, "body": body}
    return orjson.dumps({"id": request_id, "custom_id": custom_id, "response": response, "error": error})
