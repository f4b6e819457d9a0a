"""The time that each stage of the journey adds to a request, on the real embedded engine.

Runs whole journeys in this process (without HTTP) and prints p50 and p99 of every stage, and its share of the
whole, all from the same requests.

    python -m benchmarks.stages
    python -m benchmarks.stages --requests 500 --concurrency 8 --json
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from budgeting.values import EvidenceChunk, Message, Plan, Role
from gateway.config.settings import Settings, load_settings
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest, Sampling
from gateway.errors import PublicError
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from observability.events import RequestRecord
from observability.logs import configure_logging

WORDS = [
    "manga",
    "volume",
    "series",
    "shipping",
    "returns",
    "stock",
    "author",
    "genre",
    "recommend",
    "adventure",
    "drama",
    "story",
]


class CountingSink:
    """A sink that ignores all events."""

    discarded = False

    def planned(self, plan: Plan, model: str) -> None:
        """Ignore the plan."""

    async def delta(self, delta: Delta) -> None:
        """Ignore the delta."""

    async def finish(self, answer: Answer) -> None:
        """Ignore the end."""

    async def fail(self, error: PublicError) -> None:
        """Raise: no request of the benchmark may fail."""
        raise RuntimeError(f"{error.code}: {error.message}")


def request(number: int, rng: random.Random, clock: float, output_tokens: int) -> GenerateRequest:
    """Return a request of about 600 tokens: system text, evidence, context, six turns, the last one new."""
    turns = []
    for turn in range(6):
        role = Role.USER if turn % 2 == 0 else Role.ASSISTANT
        turns.append(Message(role, " ".join(rng.choices(WORDS, k=30))))
    turns.append(Message(Role.USER, f"Recommend something like Vinland Saga, number {number}"))
    chunks = tuple(
        EvidenceChunk(f"manga_{i}", "catalog", " ".join(rng.choices(WORDS, k=40)), rng.random())
        for i in range(4)
    )
    return GenerateRequest(
        request_id=f"req_{number}",
        generation_id=f"gen_{number}",
        contract=Contract.NATIVE,
        caller=Caller("bench", CallerRole.CALLER, "bench"),
        arrived_at=clock,
        created=0,
        messages=tuple(turns),
        chunks=chunks,
        context={"time": "2026-11-20T10:00:00Z", "number": number},
        session_id=f"session_{number % 50}",
        sampling=Sampling(max_tokens=output_tokens, temperature=0.0),
    )


async def measure(
    settings: Settings, requests: int, concurrency: int, output_tokens: int
) -> list[RequestRecord]:
    """Records of ``requests`` journeys; a tenth more come first and are not counted."""
    records: list[RequestRecord] = []
    gateway = build(settings, admin_key=None, observe=records.append)
    rng = random.Random(7)
    async with gateway.running():
        await _until_ready(gateway)
        slots = asyncio.Semaphore(concurrency)

        async def one(number: int) -> None:
            async with slots:
                asked = request(number, rng, time.monotonic(), output_tokens)
                await gateway.services.journey.run(asked, CountingSink())

        total = requests + requests // 10
        for begun in track(
            range(0, total, concurrency), description="journeys", console=Console(stderr=True)
        ):
            async with asyncio.TaskGroup() as tasks:
                for number in range(begun, min(total, begun + concurrency)):
                    tasks.create_task(one(number))
    return records[requests // 10 :]


async def _until_ready(gateway: Gateway) -> None:
    while not gateway.services.health.ready()[0]:  # noqa: ASYNC110 readiness has no event, on purpose: it is polled
        await asyncio.sleep(0.02)


def percentile(values: list[float], p: float) -> float:
    """The ``p``-th percentile (0 to 100) of ``values``, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))]


def summarize(records: list[RequestRecord]) -> dict[str, dict[str, float]]:
    """Return for each stage p50 and p99 in microseconds, and its mean share of the request in percent."""
    whole = sum(record.total_ms for record in records)
    rows: dict[str, dict[str, float]] = {}
    for stage in records[0].stage_ms:
        values = [record.stage_ms[stage] * 1000 for record in records]
        rows[stage] = {
            "p50_us": percentile(values, 50),
            "p99_us": percentile(values, 99),
            "share_percent": sum(values) / whole / 10,
        }
    for name, values in (
        ("gateway's own", [(record.overhead_ms or 0) * 1000 for record in records]),
        ("whole", [record.total_ms * 1000 for record in records]),
    ):
        rows[name] = {
            "p50_us": percentile(values, 50),
            "p99_us": percentile(values, 99),
            "share_percent": sum(values) / whole / 10,
        }
    return rows


def main(
    requests: Annotated[int, typer.Option(min=20, help="Counted requests.")] = 300,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer at most.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what each stage adds, p50 and p99, and its share of the whole."""
    logs = configure_logging("warning")
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(
            Path("sluice.yaml"),
            {
                "SLUICE_AUTH__ENABLED": "false",
                "SLUICE_STATE__URL": f"sqlite:///{folder}/s.db",
                "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/l.db",
            },
        )
        rows = summarize(asyncio.run(measure(settings, requests, concurrency, output_tokens)))
    logs.close()
    if as_json:
        print(json.dumps({"requests": requests, "concurrency": concurrency, "stages": rows}, indent=2))
        return
    table = Table(title=f"{requests} journeys, {concurrency} in flight, at most {output_tokens} tokens out")
    for heading in ("stage", "p50 µs", "p99 µs", "share of the whole %"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage, row in rows.items():
        table.add_row(stage, f"{row['p50_us']:.0f}", f"{row['p99_us']:.0f}", f"{row['share_percent']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
