"""Reads and changes the tables of files, batches and their lines in the ledger's database.

A gateway claims a line for a limited time, its lease. Only the holder of the claim can write the line's
result, and its usage row is written in the same transaction. So each line is answered and billed once, even
when a gateway ends in between.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, Final

from sqlalchemy import and_, delete, func, insert, or_, select, true, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batch_tables import (
    BatchCounts,
    BatchLine,
    BatchRow,
    FileRow,
    LineTokens,
    batches,
    files,
    lines,
)
from accounting.leases import LeaseClock
from accounting.store import FurtherTables
from accounting.stored_responses import StoredResponse, put_of_line
from accounting.tables import value_of
from accounting.values import UsageRow

TIMEOUT_S: Final = 10.0  # longest wait for the database
ENDED: Final = ("completed", "failed", "expired", "cancelled")
INSERTED_AT_ONCE: Final = 500


UNCLAIMED: Final = {"owner": None, "lease_until": None}
"""The column values of a batch or line that no gateway has claimed."""
_TOKENS: Final = tuple(one.name for one in fields(LineTokens))


class BatchStore(FurtherTables):
    """Files and batches by tenant, shared by all gateways of the database. Methods raise LedgerUnavailable.

    ``owner`` names this process in claims. Times are of the gateway's clock, ``unix_time``.
    """

    def __init__(self, url: str, owner: str, unix_time: Callable[[], float] = time.time) -> None:
        super().__init__(url, "files and batches cannot be reached now", timeout_s=TIMEOUT_S)
        self._owner = owner
        self._clock = LeaseClock(url, unix_time)

    # Files

    async def add_file(self, row: FileRow, tenant_bytes: int) -> bool:
        """Store a file; false when the tenant's files would exceed ``tenant_bytes`` in total."""
        taken = select(func.sum(files.c.bytes)).where(files.c.tenant == row.tenant)

        async def add(connection: AsyncConnection) -> bool:
            # Uploads of a tenant follow each other, so that none counts without another one's row.
            if connection.dialect.name == "postgresql":
                await connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(row.tenant))))
            await connection.execute(delete(files).filter_by(file_id=row.file_id))
            await connection.execute(insert(files).values(asdict(row)))
            fits = bool((await connection.execute(taken)).scalar_one() <= tenant_bytes)
            if not fits:
                await connection.rollback()
            return fits

        return await self._written(add)

    async def file(self, tenant: str, file_id: str, now: float) -> FileRow | None:
        """The file; ``None`` when it is not there, has expired, or is another tenant's."""
        query = select(files).filter_by(tenant=tenant, file_id=file_id)
        return await self._first(query.where(_is_unexpired(files.c.expires_at, now)), FileRow)

    async def list_files(
        self, tenant: str, now: float, *, after: FileRow | None, limit: int, purpose: str | None, newest: bool
    ) -> list[FileRow]:
        """A page of files in the order of their creation."""
        of = {"tenant": tenant} if purpose is None else {"tenant": tenant, "purpose": purpose}
        query = select(files).filter_by(**of).where(_is_unexpired(files.c.expires_at, now))
        query = _page(query, files.c.file_id, after, newest=newest)
        return await self._all(query.limit(limit), FileRow)

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; false when the tenant has no such file."""
        return await self._change(delete(files).filter_by(tenant=tenant, file_id=file_id))

    async def expired_files(self, now: float, most: int) -> list[FileRow]:
        """Files that have expired, except those that an unfinished batch reads."""
        read = select(batches.c.input_file_id).where(batches.c.status.not_in(ENDED))
        expired = select(files).where(files.c.expires_at <= now, files.c.file_id.not_in(read))
        return await self._all(expired.limit(most), FileRow)

    async def known_files(self, ids: Collection[str]) -> set[str]:
        query = select(files.c.file_id).where(files.c.file_id.in_(ids))
        return {row["file_id"] for row in await self._rows(query)}

    async def is_used(self, tenant: str, file_id: str) -> bool:
        """Whether an unfinished batch reads this file."""
        query = select(batches.c.batch_id).filter_by(tenant=tenant, input_file_id=file_id)
        return bool(await self._rows(query.where(batches.c.status.not_in(ENDED)).limit(1)))

    # Batches

    async def add(self, row: BatchRow) -> None:
        await self._change(insert(batches).values(asdict(row)))

    async def get(self, tenant: str, batch_id: str) -> BatchRow | None:
        """The batch; ``None`` when it is not there, or is another tenant's."""
        return await self._first(select(batches).filter_by(tenant=tenant, batch_id=batch_id), BatchRow)

    async def list_batches(self, tenant: str, *, after: BatchRow | None, limit: int) -> list[BatchRow]:
        """A page of batches, newest first."""
        query = select(batches).filter_by(tenant=tenant)
        query = _page(query, batches.c.batch_id, after, newest=True)
        return await self._all(query.limit(limit), BatchRow)

    async def unfinished(self) -> list[BatchRow]:
        """All unfinished batches, oldest first."""
        query = select(batches).where(batches.c.status.not_in(ENDED))
        return await self._all(query.order_by(batches.c.created_at, batches.c.batch_id), BatchRow)

    async def count_unfinished(self, tenant: str) -> int:
        """The number of the tenant's unfinished batches."""
        query = select(func.count()).select_from(batches).filter_by(tenant=tenant)
        async with self._transaction() as connection:
            return int((await connection.execute(query.where(batches.c.status.not_in(ENDED)))).scalar_one())

    async def delete_ended(self, before: float) -> None:
        """Delete the batches that have ended, and whose window was over at ``before``."""
        await self._change(delete(batches).where(batches.c.status.in_(ENDED), batches.c.expires_at < before))

    async def change(self, batch_id: str, was: Sequence[str], **values: Any) -> bool:
        """Set ``values`` if the batch's status is in ``was``; returns whether it was."""
        had = update(batches).filter_by(batch_id=batch_id).where(batches.c.status.in_(was))
        return await self._change(had.values(**values))

    async def claim(self, batch_id: str, was: str, now: float, until: float) -> bool:
        """Claim a batch to validate or finish; false when another gateway holds it or its status differs."""
        is_free = or_(batches.c.owner.is_(None), batches.c.lease_until < self._clock.stored(now))
        free = update(batches).filter_by(batch_id=batch_id, status=was).where(is_free)
        return await self._change(free.values(owner=self._owner, lease_until=self._clock.stored(until)))

    async def extend_leases(self, until: float, at_work: Collection[str]) -> None:
        """Extend the leases of all lines that this process has claimed, and of its batches ``at_work``."""

        async def extend(connection: AsyncConnection) -> None:
            for table, held in ((batches, batches.c.batch_id.in_(at_work)), (lines, true())):
                own = update(table).filter_by(owner=self._owner).where(held)
                await connection.execute(own.values(lease_until=self._clock.stored(until)))

        await self._written(extend)

    async def counts(self, batch_id: str) -> BatchCounts:
        sums = [func.coalesce(func.sum(lines.c[name]), 0) for name in _TOKENS]
        query = select(lines.c.status, func.count(), *sums).filter_by(batch_id=batch_id)
        async with self._transaction() as connection:
            found = (await connection.execute(query.group_by(lines.c.status))).all()
        totals = [int(sum(row[2 + place] for row in found)) for place in range(len(_TOKENS))]
        return BatchCounts({row[0]: row[1] for row in found}, LineTokens(*totals))

    async def waiting_lines(self) -> tuple[Mapping[str, int], int]:
        """The lines that have not ended, by tenant, and the number of gateways that run some."""
        query = (
            select(batches.c.tenant, lines.c.owner, func.count())
            .join_from(batches, lines, batches.c.batch_id == lines.c.batch_id)
            .where(batches.c.status.not_in(ENDED), lines.c.status.in_(("pending", "running")))
        )
        async with self._transaction() as connection:
            found = (await connection.execute(query.group_by(batches.c.tenant, lines.c.owner))).all()
        waiting: Counter[str] = Counter()
        for tenant, _, count in found:
            waiting[tenant] += count
        return waiting, len({owner for _, owner, _ in found} - {None})

    # Lines

    async def set_lines(self, batch_id: str, found: Sequence[BatchLine]) -> None:
        """Store the lines of a validated batch; replaces those that another gateway began to store."""
        await self._change(delete(lines).filter_by(batch_id=batch_id))
        empty = dict.fromkeys(_TOKENS, 0)
        for start in range(0, len(found), INSERTED_AT_ONCE):
            some = found[start : start + INSERTED_AT_ONCE]
            rows = [{**asdict(one), "status": "pending", **empty} for one in some]
            await self._written(partial(_insert_lines, rows))

    async def release(self, batch_id: str) -> None:
        """Release this process's claim of a batch."""
        own = update(batches).filter_by(batch_id=batch_id, owner=self._owner)
        await self._change(own.values(**UNCLAIMED))

    async def claim_lines(
        self, batch_id: str, now: float, until: float, most: int, after: int = -1, failed_before: bool = False
    ) -> list[BatchLine]:
        """Claim lines behind the place ``after``: waiting ones, and those of gateways that have ended."""
        free = and_(
            lines.c.batch_id == batch_id,
            lines.c.place > after,
            lines.c.failures > 0 if failed_before else lines.c.failures == 0,
            _waits(self._clock.stored(now)),
        )
        query = select(lines).where(free).order_by(lines.c.place).limit(most)

        async def claim(connection: AsyncConnection) -> list[BatchLine]:
            claimed: list[BatchLine] = []
            is_postgresql = connection.dialect.name == "postgresql"
            free_now = query.with_for_update(skip_locked=True) if is_postgresql else query
            for row in (await connection.execute(free_now)).mappings().all():
                takeovers = row["takeovers"] + (row["status"] == "running")
                taken = await connection.execute(
                    update(lines)
                    .where(free, lines.c.place == row["place"])
                    .values(
                        status="running",
                        owner=self._owner,
                        lease_until=self._clock.stored(until),
                        takeovers=takeovers,
                    )
                )
                if taken.rowcount:
                    claimed.append(value_of({**row, "takeovers": takeovers}, BatchLine))
            return claimed

        return await self._written(claim)

    async def give_back(self, line: BatchLine, failures: int = 0) -> None:
        """Release the claim of a line, so that it waits again, and add ``failures`` to its count."""
        waits = self._own(line).values(status="pending", failures=lines.c.failures + failures, **UNCLAIMED)
        await self._change(waits)

    async def give_all_back(self) -> None:
        """Release all claims of this process; its lines wait again.

        A process that ends does not wait for another connection's lock: the leases run out.
        """
        async with self._transaction() as connection:
            running = update(lines).filter_by(owner=self._owner, status="running")
            await connection.execute(running.values(status="pending", **UNCLAIMED))
            await connection.execute(update(batches).filter_by(owner=self._owner).values(**UNCLAIMED))

    async def finish(
        self,
        line: BatchLine,
        status: str,
        output: bytes,
        usage: UsageRow | None,
        response: StoredResponse | None = None,
    ) -> bool:
        """Store a line's result, its usage row and the response that it asked to store.

        False, and nothing stored, when the claim was lost.
        """
        tokens = {} if usage is None else {name: getattr(usage, name) for name in _TOKENS}

        async def end(connection: AsyncConnection) -> bool:
            ended = await connection.execute(
                self._own(line).values(status=status, output=output, **UNCLAIMED, **tokens)
            )
            if not ended.rowcount:
                return False
            if usage is not None:
                await self._store.insert((usage,), connection)
            if response is not None:
                await put_of_line(connection, response)
            return True

        return await self._written(end)

    async def end_lines(self, batch_id: str, now: float) -> bool:
        """Mark waiting lines, and lines of ended gateways, as ``unrun``; true when no line is running."""
        waiting = update(lines).filter_by(batch_id=batch_id).where(_waits(self._clock.stored(now)))
        running = select(lines.c.place).filter_by(batch_id=batch_id, status="running")

        async def end(connection: AsyncConnection) -> bool:
            await connection.execute(waiting.values(status="unrun", **UNCLAIMED))
            return (await connection.execute(running.limit(1))).first() is None

        return await self._written(end)

    async def results(
        self, batch_id: str, statuses: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, int, str, bytes | None]]:
        """A page of lines in order of number: (number, place, ``custom_id``, output)."""
        query = (
            select(lines.c.number, lines.c.place, lines.c.custom_id, lines.c.output)
            .filter_by(batch_id=batch_id)
            .where(lines.c.status.in_(statuses), lines.c.number > after)
            .order_by(lines.c.number)
            .limit(limit)
        )
        return [
            (row["number"], row["place"], row["custom_id"], row["output"]) for row in await self._rows(query)
        ]

    async def forget_lines(self, batch_id: str) -> None:
        """Delete the lines after their outputs were written to files."""
        await self._change(delete(lines).filter_by(batch_id=batch_id))

    def _own(self, line: BatchLine) -> Any:
        mine = {"status": "running", "owner": self._owner}
        return update(lines).filter_by(batch_id=line.batch_id, place=line.place, **mine)


async def _insert_lines(rows: Sequence[dict[str, Any]], connection: AsyncConnection) -> None:
    await connection.execute(insert(lines), rows)


def _is_unexpired(expires_at: Any, now: float) -> Any:
    return or_(expires_at.is_(None), expires_at > now)


def _waits(now: Any) -> Any:
    """The condition that a line waits: it is pending, or the lease of the gateway that ran it is over."""
    return or_(lines.c.status == "pending", and_(lines.c.status == "running", lines.c.lease_until < now))


def _page(query: Any, key: Any, after: FileRow | BatchRow | None, *, newest: bool) -> Any:
    """``query`` in order of time, from after the previous page's last row."""
    at = key.table.c.created_at
    if after is not None:
        before, place = tuple_(at, key), tuple_(after.created_at, getattr(after, key.name))
        query = query.where(before < place if newest else before > place)
    return query.order_by(at.desc(), key.desc()) if newest else query.order_by(at, key)
