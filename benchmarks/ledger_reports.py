"""How long do sums of a large ledger take? Rows of 90 days in SQLite, and each sum that the console asks for.

python -m benchmarks.ledger_reports                   # 1,000,000 rows
python -m benchmarks.ledger_reports --rows 100000
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from sqlalchemy import create_engine

from accounting.reports import Span, UsageReport
from accounting.tables import RowInsert, metadata
from accounting.values import UsageRow

DAYS = 90
DAY_S = 86_400.0
END_S = 1_800_000_000.0
SPANS = {"last day": 1, "last 7 days": 7, "last 30 days": 30, "all": None}
GROUPS = (
    ("tenant",), ("model",), ("day",), ("key",), ("route",), ("adapter",), ("backend",),
    ("tenant", "model", "day"),
)  # fmt: skip
REPEATS = 5
BATCH = 10_000


def made_rows(count: int, draw: random.Random) -> Iterator[UsageRow]:
    """Rows of 40 tenants and 6 models, spread evenly over the days before :data:`END_S`."""
    for number in range(count):
        tenant = min(int(draw.expovariate(0.1)), 39)
        tokens_in, tokens_out = draw.randint(50, 4_000), draw.randint(1, 800)
        yield UsageRow(
            generation_id=f"gen_{number:026}",
            request_id=f"req_{number:026}",
            tenant=f"tenant-{tenant}",
            key_id=f"key_{tenant}_{draw.randrange(3)}",
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


def main(
    rows: Annotated[int, typer.Option(min=1)] = 1_000_000,
    folder: Annotated[
        Path | None, typer.Option(help="Where the database is made; else a temporary one.")
    ] = None,
) -> None:
    """Print the median time of each sum, in milliseconds."""
    console = Console()
    with tempfile.TemporaryDirectory(dir=folder) as made:
        engine = create_engine(f"sqlite:///{made}/ledger.db")
        metadata.create_all(engine)
        insert = RowInsert(engine.dialect)
        values = (insert.values(one) for one in made_rows(rows, random.Random(0)))
        with engine.begin() as connection:
            while batch := list(itertools.islice(values, BATCH)):
                connection.exec_driver_sql(insert.sql, batch)
        for span, days in SPANS.items():
            since = None if days is None else END_S - days * DAY_S
            for by in GROUPS:
                report = UsageReport(by, Span(since))
                times, lines = [], 0
                for _ in range(REPEATS):
                    with engine.connect() as connection:
                        started = time.perf_counter()
                        found: list[Any] = list(connection.execute(report.query()).mappings())
                        times.append(time.perf_counter() - started)
                        lines = len(found)
                took = 1_000 * statistics.median(times)
                console.print(f"{span:>12}  by {', '.join(by):<20} {lines:>6} lines  {took:8.1f} ms")


if __name__ == "__main__":
    typer.run(main)
