"""The table ``responses`` in the ledger's database: what clients of OpenAI's Responses API asked to store."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.errors import LedgerUnavailable
from accounting.leases import LeaseClock
from accounting.store import FurtherTables, is_the_rows_fault
from accounting.tables import columns_of, insert_into, metadata, value_of

# Longest time that an answer waits for the database: a sync of a busy disk takes a second.
TIMEOUT_S: Final = 5.0
UNFINISHED: Final = ("queued", "in_progress")
CANCELLED: Final = "cancelled"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Args:
        previous_id: the response whose conversation it continues.
        input: its own input items, compressed.
        body: the response object, compressed.
        events: the event stream of a background response, compressed.
        alive_until: Unix seconds. The gateway that runs an unfinished response extends this lease. Once
            another gateway has cancelled the response, the runner may store output and stream until then.
        again: the data that another gateway needs to run an unfinished one again; empty: it must not.
            ``None``: it must not, and if there was data, another gateway runs it again, which alone may now
            change it.
    """

    tenant: str
    response_id: str
    previous_id: str | None
    status: str
    created_at: float
    expires_at: float
    input: bytes
    body: bytes
    events: bytes | None = None
    alive_until: float | None = None
    again: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes that count towards the tenant's ``tenant_bytes``."""
        return len(self.input) + len(self.body) + len(self.events or b"") + len(self.again or b"")

    def open(self, now: float) -> bool:
        """Whether its end is still to be stored."""
        return self.status in UNFINISHED or (self.alive_until is not None and self.alive_until > now)


responses = sa.Table(
    "responses",
    metadata,
    *columns_of(StoredResponse),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.PrimaryKeyConstraint("tenant", "response_id"),
    sa.Index("ix_responses_alive_until", "alive_until"),
    sa.Index("ix_responses_expires_at", "expires_at"),
    sa.Index("ix_responses_tenant_created_at", "tenant", "created_at"),
)


_KEY: Final = responses.primary_key.columns.keys()


class _New(Struct, eq=False):
    """A new response that waits for its transaction."""

    columns: dict[str, Any]
    ended: bool = False
    error: Exception | None = None


class ResponseStore(FurtherTables):
    """Stores responses by tenant; any gateway on the database reads them. Methods raise LedgerUnavailable.

    A tenant's oldest responses are deleted when all of them take more than ``tenant_bytes``. Times are of
    the gateway's clock, ``unix_time``.
    """

    def __init__(self, url: str, *, tenant_bytes: int, unix_time: Callable[[], float] = time.time) -> None:
        super().__init__(url, "stored responses cannot be reached now", timeout_s=TIMEOUT_S)
        self._tenant_bytes = tenant_bytes
        self._clock = LeaseClock(url, unix_time)
        self._new: list[_New] = []
        self._putting = asyncio.Lock()
        lease = responses.c.alive_until
        self._read = [self._clock.own(one) if one is lease else one for one in responses.c]
        self._thread = _thread([one for one in self._read if one.name not in ("size", "events", "again")])
        # Made once: an idle gateway asks this again and again.
        self._first_lease = (
            sa.select(self._clock.own(lease))
            .where(lease.is_not(None), responses.c.status.in_(UNFINISHED))
            .order_by(lease)
            .limit(1)
        )

    async def put(self, response: StoredResponse) -> None:
        """Store a new response. Those that wait at the same time share a transaction, and its sync."""
        columns = self._columns(response)
        if response.alive_until is not None:  # the database's clock may be a part of its lease
            insert = sa.insert(responses).values(columns)
            await self._written(lambda connection: connection.execute(insert))
            return
        new = _New(columns)
        self._new.append(new)
        try:
            async with self._putting:
                if not new.ended:
                    await self._put_all()
        finally:
            if new in self._new:  # cancelled
                self._new.remove(new)
        if new.error is not None:
            raise new.error

    async def _put_all(self) -> None:
        batch, self._new = self._new, []
        try:
            await self._insert(batch)
        except BaseException:  # cancelled: the next caller stores them
            self._new = batch + self._new
            raise
        for one in batch:
            one.ended = True

    async def _insert(self, batch: Sequence[_New]) -> None:
        rows = [one.columns for one in batch]
        try:
            await self._written(lambda connection: connection.execute(_insert_new(connection.dialect), rows))
        except Exception as error:
            cause = error.__cause__ if isinstance(error, LedgerUnavailable) else error
            if len(batch) == 1 or not isinstance(cause, Exception) or not is_the_rows_fault(cause):
                for one in batch:
                    one.error = error
                return
            for one in batch:
                await self._insert([one])

    async def finish(self, response: StoredResponse) -> bool:
        """Replace an unfinished response; false when it was deleted, or ended or claimed elsewhere.

        A cancelled response replaces what the gateway that cancelled it stored, which has no stream.
        """
        ended = self._columns(replace(response, again=None))
        change = _unfinished(response, CANCELLED).values(ended)
        return await self._change(change)

    async def keep_alive(self, response: StoredResponse, until: float) -> bool:
        """Extend the lease until ``until``; false when it was deleted, or ended or claimed elsewhere."""
        return await self._change(
            _unfinished(response).values(
                alive_until=self._clock.stored(until), status=response.status, body=response.body
            )
        )

    async def forbid_rerun(self, response: StoredResponse) -> None:
        """Forbid other gateways to run the response again."""
        await self._change(_unfinished(response).where(responses.c.again.is_not(None)).values(again=b""))

    async def claim(self, response: StoredResponse, now: float, until: float) -> bool:
        """Claim an abandoned response to run it a last time; false when claimed elsewhere or ended."""
        late = _unfinished(response).where(responses.c.alive_until < self._clock.stored(now))
        return await self._change(late.values(alive_until=self._clock.stored(until), again=None))

    async def thread(
        self, tenant: str, response_id: str, now: float, *, most: int, most_bytes: int
    ) -> list[StoredResponse]:
        """The response and its predecessors, oldest first, without their streams.

        Empty when one of them is missing, or belongs to another tenant. A thread over ``most`` responses or
        ``most_bytes`` lacks its beginning: the first one returned then has a ``previous_id``.
        """
        asked = {"tenant": tenant, "response_id": response_id, "now": now}
        asked |= {"most": most, "most_bytes": most_bytes}
        async with self._transaction() as connection:
            rows = (await connection.execute(self._thread, asked)).mappings().all()
        found = [value_of(row, StoredResponse) for row in rows]
        cut = len(found) == most or sum(one.size for one in found) > most_bytes
        if found and found[-1].previous_id is not None and not cut:
            return []
        return found[::-1]

    async def get(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """The response with its stream; ``None`` when it does not exist, expired, or is another tenant's."""
        query = sa.select(*self._read).filter_by(tenant=tenant, response_id=response_id)
        return await self._first(query.where(responses.c.expires_at > now), StoredResponse)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; false when the tenant has no such response."""
        return await self._change(sa.delete(responses).filter_by(tenant=tenant, response_id=response_id))

    async def first_lease_end(self) -> float | None:
        """When the first lease of an unfinished response ends; ``None``: there is none."""
        rows = await self._rows(self._first_lease)
        return rows[0]["alive_until"] if rows else None

    async def abandoned(self, now: float, most: int) -> list[StoredResponse]:
        """Unfinished responses whose lease is over: their gateway has stopped extending it."""
        late = responses.c.status.in_(UNFINISHED) & (responses.c.alive_until < self._clock.stored(now))
        return await self._all(sa.select(*self._read).where(late).limit(most), StoredResponse)

    async def sweep(self, now: float) -> None:
        """Delete expired responses, and the oldest ones of tenants that exceed ``tenant_bytes``."""
        async with self._transaction() as connection:
            await connection.execute(sa.delete(responses).where(responses.c.expires_at <= now))
            size, tenant, key = responses.c.size, responses.c.tenant, responses.c.response_id
            over = sa.select(tenant).group_by(tenant).having(sa.func.sum(size) > self._tenant_bytes)
            newest_first = (responses.c.created_at.desc(), key)
            taken = sa.func.sum(size).over(partition_by=tenant, order_by=newest_first).label("taken")
            ranked = sa.select(tenant, key, taken).where(tenant.in_(over)).subquery()
            surplus = sa.select(ranked.c.tenant, ranked.c.response_id)
            surplus = surplus.where(ranked.c.taken > self._tenant_bytes)
            await connection.execute(sa.delete(responses).where(sa.tuple_(tenant, key).in_(surplus)))

    def _columns(self, response: StoredResponse) -> dict[str, Any]:
        lease = self._clock.stored(response.alive_until)
        return {**asdict(response), "alive_until": lease, "size": response.size}


def _thread(columns: Sequence[sa.ColumnElement[Any]]) -> sa.Select[Any]:
    """The query of :meth:`ResponseStore.thread`, newest first: one for all turns of a conversation."""
    this = responses.c
    size = sa.func.length(this.input) + sa.func.length(this.body)
    mine = (this.tenant == sa.bindparam("tenant")) & (this.expires_at > sa.bindparam("now"))
    first = sa.select(
        this.response_id, this.previous_id, sa.literal(1).label("number"), size.label("bytes")
    ).where(mine, this.response_id == sa.bindparam("response_id"))
    turns = first.cte("turns", recursive=True)
    before = sa.select(this.response_id, this.previous_id, turns.c.number + 1, turns.c.bytes + size)
    before = before.where(mine, this.response_id == turns.c.previous_id)
    room = (turns.c.number < sa.bindparam("most")) & (turns.c.bytes <= sa.bindparam("most_bytes"))
    turns = turns.union_all(before.where(room))
    found = sa.select(*columns).join(turns, this.response_id == turns.c.response_id)
    return found.where(this.tenant == sa.bindparam("tenant")).order_by(turns.c.number)


def _insert_new(dialect: Dialect) -> sa.Executable:
    """Store new responses. One that is stored already was in a transaction whose end was not known."""
    return insert_into(responses, dialect).on_conflict_do_nothing(index_elements=_KEY)


async def put_of_line(connection: AsyncConnection, response: StoredResponse) -> None:
    """Store the response of a batch's line; versions that stored it before the result may have left one."""
    columns = {**asdict(response), "size": response.size}
    new = insert_into(responses, connection.dialect).values(columns)
    await connection.execute(new.on_conflict_do_update(index_elements=_KEY, set_=columns))


def _unfinished(response: StoredResponse, or_status: str | None = None) -> Any:
    unended: sa.ColumnElement[bool] = responses.c.status.in_(UNFINISHED)
    if response.again is not None:
        unended &= responses.c.again.is_not(None)
    if response.status == or_status:
        unended |= (responses.c.status == or_status) & responses.c.events.is_(None)
    one = {"tenant": response.tenant, "response_id": response.response_id}
    return sa.update(responses).filter_by(**one).where(unended)
