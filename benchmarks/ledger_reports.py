"""How long sums over a large ledger take: 90 days of rows in SQLite, and each sum that the console requests.

python -m benchmarks.ledger_reports                   # 1,000,000 rows
python -m benchmarks.ledger_reports --postgres
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy import text

from accounting.reports import Span, UsageReport
from accounting.store import GenerationStore
from accounting.values import DAY_S, HOUR_S, UsageRow
from benchmarks.ledger_postgres import postgres

DAYS = 90
END_S = 1_800_000_000.0
SPANS = {"last day": 1, "last 7 days": 7, "last 30 days": 30, "all": None}
GROUPS = (
    ("tenant",), ("model",), ("day",), ("org",), ("user",), ("key",), ("route",), ("adapter",), ("backend",),
    ("tenant", "model"), ("tenant", "day"), ("model", "day"), ("tenant", "model", "day"),
)  # fmt: skip
REPEATS = 3
BATCH = 10_000
USERS = 1_000


def made_rows(count: int, draw: random.Random) -> Iterator[UsageRow]:
    """Yield rows of 40 tenants, about 5,000 users and 6 models, spread evenly before :data:`END_S`."""
    for number in range(count):
        tenant = min(int(draw.expovariate(0.1)), 39)
        tokens_in, tokens_out = draw.randint(50, 4_000), draw.randint(1, 800)
        yield UsageRow(
            generation_id=f"gen_{number:026}",
            request_id=f"req_{number:026}",
            tenant=f"tenant-{tenant}",
            key_id=f"key_{tenant}_{draw.randrange(3)}",
            org=f"org-{tenant % 8}",
            user_id=f"user-{min(int(draw.expovariate(1 / USERS)), 10 * USERS)}",
            contract="chat",
            route=f"route-{draw.randrange(4)}",
            started_at=END_S - DAYS * DAY_S * (1 - number / count),
            adapter_id=f"adapter-{draw.randrange(8)}",
            backend="vllm",
            backend_name=f"pool-{draw.randrange(4)}",
            model=f"model-{draw.randrange(6)}",
            finish_reason="stop",
            input_tokens=tokens_in,
            output_tokens=tokens_out,
            cached_tokens=tokens_in // 2,
            billable_input_tokens=tokens_in,
            billable_output_tokens=tokens_out,
            cost_nanousd=tokens_out * 600,
            price_version="1",
        )


async def measure(url: str, rows: int, console: Console) -> None:
    """Print the median milliseconds of each sum: from the rows alone, and with stored sums of whole days."""
    store = GenerationStore(url)
    store.connect()
    await store.prepare()
    made = made_rows(rows, random.Random(0))
    started = time.perf_counter()
    while batch := list(itertools.islice(made, BATCH)):
        await store.write(batch)
    console.print(f"{rows:,} rows written in {time.perf_counter() - started:.1f} s")
    before = await times(store)
    started, days = time.perf_counter(), 0
    while await store.sum_a_day(int(END_S // DAY_S)):
        days += 1
    console.print(f"{days} days summed up in {time.perf_counter() - started:.1f} s")
    async with store.transaction("") as connection:
        if connection.dialect.name == "postgresql":
            await connection.execute(text("ANALYZE"))
    for (span, by), (lines, took_ms, cpu_ms) in (await times(store)).items():
        title = f"{span:>12}  by {by:<20} {lines:>6} lines"
        console.print(
            f"{title}  {before[span, by][1]:8.1f} ms of rows  {took_ms:8.1f} ms, {cpu_ms:8.1f} of CPU"
        )
    await store.close(None)


async def times(store: GenerationStore) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return for each span and grouping the lines of the report and the milliseconds: wall, and CPU."""
    found = {}
    for span, days in SPANS.items():
        # As the console requests it: from a full hour on.
        since = None if days is None else (END_S // HOUR_S - 24 * days) * HOUR_S
        for by in GROUPS:
            report = UsageReport(by, Span(since))
            taken = []
            for _ in range(REPEATS):
                began, cpu = time.perf_counter(), time.process_time()
                lines = len(await store.select(report.query()))
                taken.append((time.perf_counter() - began, time.process_time() - cpu))
            found[span, ", ".join(by)] = (
                lines,
                *(1_000 * statistics.median(one) for one in zip(*taken, strict=True)),
            )
    return found


def main(
    rows: Annotated[int, typer.Option(min=1)] = 1_000_000,
    folder: Annotated[
        Path | None, typer.Option(help="Where the database is made; else a temporary one.")
    ] = None,
    server: Annotated[bool, typer.Option("--postgres", help="In PostgreSQL, not SQLite.")] = False,
) -> None:
    """Print the median time of each sum."""
    console = Console(width=120)
    with ExitStack() as stack:
        if server:
            url = stack.enter_context(postgres()).url
        else:
            made = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            url = f"sqlite+aiosqlite:///{made}/ledger.db"
        asyncio.run(measure(url, rows, console))


if __name__ == "__main__":
    typer.run(main)
