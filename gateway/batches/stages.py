"""The stages of a batch before and after its lines run: checking its input, writing its result files."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import orjson
import structlog

from accounting.batch_tables import BatchRow
from accounting.errors import LedgerUnavailable
from gateway.batches.batches import with_changes
from gateway.batches.files import Files
from gateway.batches.outcome import unrun_line
from gateway.batches.reading import BodyFault, LineFault, checked

NO_CONTENT: Final = (
    "the input file's content is not in the storage (batches.folder) of the gateway that asked for it"
)
PAGE: Final = 500  # lines whose results are held in memory at once


_log = structlog.get_logger("gateway.batches")


async def validate(files: Files, batch: BatchRow, body_fault: BodyFault) -> None:
    """Check the input file, and store its lines to be run; a fault ends the batch, as does a defect."""
    store, section = files.store, files.section
    try:
        await files.check_key(batch.tenant, batch.input_file_id)
        found = await asyncio.to_thread(
            checked,
            batch.batch_id,
            batch.endpoint,
            files.storage.chunks(batch.input_file_id),
            body_fault,
            max_lines=section.max_lines,
        )
    except FileNotFoundError as error:
        _log.error("file not read", batch=batch.batch_id, file=batch.input_file_id, reason=str(error))
        fault = LineFault("file_not_found", NO_CONTENT, None, "input_file_id")
        await _fail(files, batch, [fault])
        return
    except (OSError, LedgerUnavailable):
        raise
    except Exception as defect:
        # Each gateway would take the batch in turn, and end by it.
        _log.error("file not checked", batch=batch.batch_id, error_type=type(defect).__name__)
        await _fail(files, batch, [LineFault("internal", "the gateway cannot check the input file")])
        return
    if found.faults:
        await _fail(files, batch, found.faults)
        return
    await store.set_lines(batch.batch_id, found.lines)
    await store.change(
        batch.batch_id,
        ("validating",),
        status="in_progress",
        total=len(found.lines),
        owner=None,
        lease_until=None,
        body=with_changes(batch.body, model=found.model, in_progress_at=int(files.now())),
    )


async def _fail(files: Files, batch: BatchRow, faults: Sequence[LineFault]) -> None:
    errors = {"object": "list", "data": [asdict(one) for one in faults]}
    body = with_changes(batch.body, errors=errors, failed_at=int(files.now()))
    await files.store.change(
        batch.batch_id, ("validating",), status="failed", ending="failed", owner=None, body=body
    )


async def finish(files: Files, batch: BatchRow) -> None:
    """Write the result files and end the batch. If this gateway ends meanwhile, this is done again."""
    store, ending = files.store, batch.ending or "completed"
    row = await store.get(batch.tenant, batch.batch_id)
    body = (row or batch).body
    if batch.status == "finalizing":
        body = with_changes(body, finalizing_at=int(files.now()))
    output = await _results(files, batch, "output", ("done",), ending)
    # Lines are still pending if another gateway stored them, as it validated the batch, just before this.
    errors = await _results(files, batch, "error", ("failed", "unrun", "pending"), ending)
    counts = await store.counts(batch.batch_id)
    ended = with_changes(
        body,
        output_file_id=output,
        error_file_id=errors,
        counts=counts,
        **{f"{ending}_at": int(files.now())},
    )
    total = sum(counts.by_status.values())  # not stored yet if the batch ended while it was validated
    if await store.change(
        batch.batch_id, (batch.status,), status=ending, body=ended, total=total, owner=None, lease_until=None
    ):
        await store.forget_lines(batch.batch_id)
        _log.info("batch ended", batch=batch.batch_id, status=ending)


async def _results(
    files: Files, batch: BatchRow, kind: str, statuses: tuple[str, ...], ending: str
) -> str | None:
    file_id = f"file-{batch.batch_id.removeprefix('batch_')}-{kind}"
    with tempfile.TemporaryFile() as written:
        after, size = 0, 0
        while page := await files.store.results(batch.batch_id, statuses, after, PAGE):
            after = page[-1][0]
            lines = [
                output or unrun_line(batch.batch_id, number, custom_id, ending)
                for number, _, custom_id, output in page
            ]
            data = b"".join(line + b"\n" for line in lines)
            size += len(data)
            await asyncio.to_thread(written.write, data)
        now = await files.store.get(batch.tenant, batch.batch_id)
        if not size or now is None or now.status != batch.status:
            return None  # nothing, or another gateway ended the batch, and lines may be gone
        written.seek(0)
        await asyncio.to_thread(files.storage.put, file_id, written)
    kept_s = float(orjson.loads(batch.body)["output_seconds"])
    await files.add_result(batch.tenant, file_id, f"{batch.batch_id}_{kind}.jsonl", size, kept_s)
    return file_id
