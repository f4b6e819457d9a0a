"""What callers do with batches: create, read, cancel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from accounting.batch_tables import BatchCounts, BatchRow, FileRow, LineTokens
from accounting.batches import ENDED
from gateway.batches.files import Files
from gateway.contracts.batches import MAX_WINDOW_S, BatchBody, window_s
from gateway.contracts.refusals import not_allowed, path_of
from gateway.contracts.values import Caller
from gateway.errors import NotFound, QuotaExceeded, WindowTooShort

RUNNABLE: Final = ("validating", "in_progress")
"""The statuses of a batch that can be cancelled, or expire."""
MAX_UNFINISHED: Final = 1_000  # most batches of one tenant that have not ended: each is looked at each second


@dataclass(frozen=True, slots=True)
class Batches:
    """A batch belongs to its tenant; for other tenants its id is unknown.

    ``lines_per_s``: lines that end per second on each gateway at present; ``None``: not known.
    """

    files: Files
    lines_per_s: Callable[[], float | None] = lambda: None
    max_unfinished: int = MAX_UNFINISHED

    async def create(self, caller: Caller, batch_id: str, asked: BatchBody) -> dict[str, Any]:
        """Create a batch; a gateway validates it soon.

        Raises NotFound, InvalidRequest, QuotaExceeded, WindowTooShort.
        """
        file = await self.files.get(caller.tenant, asked.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise not_allowed("input_file_id", f"is a file for {file.purpose}", "a file for batch")
        now, window = self.files.now(), window_s(asked.completion_window) or 0.0
        after = asked.output_expires_after
        stored = {
            "completion_window": asked.completion_window,
            "metadata": asked.metadata,
            "output_seconds": self.files.section.keep_seconds if after is None else after.seconds,
        }
        row = BatchRow(
            batch_id,
            caller.tenant,
            caller.key_id,
            caller.own_salt,
            asked.endpoint,
            file.file_id,
            "validating",
            now,
            now + window,
            orjson.dumps(stored),
        )
        await self._check_window(file, window)
        if await self.files.store.count_unfinished(caller.tenant) >= self.max_unfinished:
            raise QuotaExceeded(
                f"{self.max_unfinished} batches of the tenant have not ended; wait for one, or cancel one"
            )
        await self.files.store.add(row)
        self.files.submitted.set()
        return batch_body(row, BatchCounts())

    async def show(self, tenant: str, batch_id: str) -> dict[str, Any]:
        return await self._with_counts(await self._get(tenant, batch_id, "batch_id"))

    async def page(self, tenant: str, *, after: str | None, limit: int) -> list[dict[str, Any]]:
        last = None if after is None else await self._get(tenant, after, "after")
        rows = await self.files.store.list_batches(tenant, after=last, limit=limit)
        return [await self._with_counts(row) for row in rows]

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Cancel a batch: no further line starts. A batch that has ended stays as it is."""
        changed = False
        while not changed and (row := await self._get(tenant, batch_id, "batch_id")).status in RUNNABLE:
            body = with_changes(row.body, cancelling_at=int(self.files.now()))
            # Only if it is as it was read: the end of its validation adds to the body.
            changed = await self.files.store.change(
                batch_id, (row.status,), status="cancelling", ending="cancelled", body=body
            )
        return await self.show(tenant, batch_id)

    async def _check_window(self, file: FileRow, window: float) -> None:
        """Raise WindowTooShort if the batch cannot end within ``window`` at the present speed.

        Its lines are estimated from the beginning of the file. Tenants take turns, so that a batch waits for
        as many lines of another tenant as its own tenant has, at most.
        """
        if (speed := self.lines_per_s()) is None:
            return
        waiting, gateways = await self.files.store.waiting_lines()
        start = next(await self.files.content(file), b"")
        own = waiting.get(file.tenant, 0) + max(1.0, file.bytes * start.count(b"\n") / (len(start) or 1))
        ahead = own + sum(min(own, count) for tenant, count in waiting.items() if tenant != file.tenant)
        speed *= max(1, gateways)
        if (needed_s := ahead / speed) > window:
            minutes = int(needed_s / 60) + 1
            needed = f"{minutes}m" if minutes <= 120 else f"{-(-minutes // 60)}h"
            allowed = f"ask for a completion_window of {needed} or more"
            if needed_s > MAX_WINDOW_S:
                allowed = "ask for fewer lines, or later"
            raise WindowTooShort(
                f"about {ahead:.0f} lines end before the batch does, which takes {needed} now; {allowed}",
                param="completion_window",
            )

    async def _get(self, tenant: str, batch_id: str, param: str) -> BatchRow:
        row = await self.files.store.get(tenant, batch_id)
        if row is None:
            raise NotFound(f"no batch '{path_of([batch_id])}' is stored", param=param)
        return row

    async def _with_counts(self, row: BatchRow) -> dict[str, Any]:
        if (ended := orjson.loads(row.body).get("counts")) is not None:
            return batch_body(row, BatchCounts(ended["by_status"], LineTokens(**ended["tokens"])))
        return batch_body(row, await self.files.store.counts(row.batch_id))


def with_changes(body: bytes, **changes: Any) -> bytes:
    """The fields of a batch that only clients read (``BatchRow.body``), with ``changes``."""
    return orjson.dumps({**orjson.loads(body), **changes})


def batch_body(row: BatchRow, counts: BatchCounts) -> dict[str, Any]:
    stored: Mapping[str, Any] = orjson.loads(row.body)
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": row.batch_id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": stored.get("model"),
        "errors": stored.get("errors"),
        "input_file_id": row.input_file_id,
        "completion_window": stored["completion_window"],
        "status": row.status,
        "output_file_id": stored.get("output_file_id"),
        "error_file_id": stored.get("error_file_id"),
        "created_at": int(row.created_at),
        "expires_at": int(row.expires_at),
        **{f"{name}_at": stored.get(f"{name}_at") for name in times},
        "request_counts": {
            "total": row.total,
            "completed": counts.of("done"),
            "failed": counts.of("failed"),
        },
        "usage": _usage(counts.tokens) if row.status in ENDED else None,
        "metadata": stored["metadata"],
    }


def _usage(tokens: LineTokens) -> dict[str, Any]:
    return {
        "input_tokens": tokens.input_tokens,
        "input_tokens_details": {"cached_tokens": tokens.cached_tokens},
        "output_tokens": tokens.output_tokens,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning_tokens},
        "total_tokens": tokens.input_tokens + tokens.output_tokens,
    }
