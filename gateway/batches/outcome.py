"""The outcome of a line, and its record in the result files."""

from dataclasses import dataclass

import orjson

from accounting.batch_tables import BatchLine
from accounting.stored_responses import StoredResponse
from accounting.values import UsageRow


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """The outcome of one try of a line.

    Args:
        body: the body of the answer or the error, in the contract's form.
        usage: its bill; ``None`` when nothing is billed.
        response: what it asked to store for later requests, if anything.
        reason: why it was refused or failed, for the log.
        retry_s: the line was refused for now: seconds until it runs again. ``None``: it was not refused.
        engine_died: the engine that ran it has died; another try may succeed.
        failed_here: the fault is the backend's, so another try may succeed.
    """

    status: int
    body: bytes
    usage: UsageRow | None = None
    response: StoredResponse | None = None
    reason: str = ""
    retry_s: float | None = None
    engine_died: bool = False
    failed_here: bool = False


def at_fault(reason: str) -> LineOutcome:
    """The outcome of a line that is not tried again, because of ``reason``."""
    error = {"message": f"{reason}; it is not tried again", "type": "server_error", "code": "line_failed"}
    return LineOutcome(500, orjson.dumps({"error": error}))


def output_line(line: BatchLine, outcome: LineOutcome) -> bytes:
    request_id, body = request_id_of(line.batch_id, line.number), orjson.Fragment(outcome.body)
    response = {"status_code": outcome.status, "request_id": request_id, "body": body}
    return orjson.dumps({"id": request_id, "custom_id": line.custom_id, "response": response, "error": None})


def unrun_line(batch_id: str, number: int, custom_id: str, ending: str) -> bytes:
    """The record of a line that did not run before its batch was ``expired`` or ``cancelled``."""
    error = {"code": f"batch_{ending}", "message": f"the batch is {ending}; this line was not run"}
    request_id = request_id_of(batch_id, number)
    return orjson.dumps({"id": request_id, "custom_id": custom_id, "response": None, "error": error})


def request_id_of(batch_id: str, number: int) -> str:
    """The id of a line's request, also in the ledger."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
