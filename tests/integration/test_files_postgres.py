"""Files of tenants on PostgreSQL."""

from __future__ import annotations

import asyncio

from accounting.batch_tables import FileRow
from accounting.batches import BatchStore
from benchmarks.ledger_postgres import postgres


async def test_a_tenants_quota_of_files_holds_for_uploads_at_the_same_time_through_two_gateways() -> None:
    with postgres() as server:
        gateways = [BatchStore(server.url, owner) for owner in "ab"]
        await gateways[0].unfinished()  # creates the tables
        rows = [FileRow(f"file-{n}", "acme", "f", "batch", 400, 1.0, None) for n in range(8)]
        added = [gateways[n % 2].add_file(row, tenant_bytes=1_000) for n, row in enumerate(rows)]
        assert sum(await asyncio.gather(*added)) == 2
        for gateway in gateways:
            await gateway.close()
