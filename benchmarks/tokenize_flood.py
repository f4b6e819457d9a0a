"""How one tenant that tokenizes large texts affects other tenants and the gateway's memory.

    python -m benchmarks.tokenize_flood
    python -m benchmarks.tokenize_flood --concurrency 12 --bytes 2400000 --seconds 20

One gateway without an engine has one fake worker. Another tenant requests short answers at a steady rate and
a probe requests ``/ping``, first alone, then while ``--concurrency`` callers of one tenant post texts to
``/tokenize`` from a process of their own, each with an ``Idempotency-Key`` and ``return_token_strs``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import python_module
from benchmarks.forwarding.processes import started
from benchmarks.routing_propagation import KEY, CallerResults, ask, one_gateway, ready, worker, write_settings

RATE = 20.0
"""Requests a second of the other tenant."""
PROBE_EVERY_S = 0.02
SAMPLE_EVERY_S = 0.1
TIMEOUT_S = 120.0
SETTLE_S = 2.0
_WORDS = "The gateway counts the tokens of this text, which is long and of many words. "


@dataclass
class Phase:
    """Times in seconds, memory in bytes."""

    asked_s: list[float] = field(default_factory=list)
    probed_s: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Return a quantile of the times of the other tenant's requests, in ms."""
        times = sorted(self.asked_s)
        return times[min(len(times) - 1, int(share * len(times)))] * 1e3


@dataclass(frozen=True, slots=True)
class Result:
    """The other tenant's times and the slowest ``/ping`` in ms, alone and during the flood; memory in MiB."""

    p50_alone_ms: float
    p99_alone_ms: float
    p50_ms: float
    p99_ms: float
    longest_ping_alone_ms: float
    longest_ping_ms: float
    failed: int
    memory_before_mib: float
    memory_most_mib: float
    memory_after_mib: float
    tokenized: dict[str, int]


Request = Callable[[int], Awaitable[object]]


async def steady(request: Request, phase: Phase, seconds: float) -> None:
    """Send the other tenant's requests by number, each when it is due."""
    loop = asyncio.get_running_loop()
    end, due = loop.time() + seconds, loop.time()

    async def one(number: int) -> None:
        began = time.perf_counter()
        await request(number)
        phase.asked_s.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        number = 0
        while due < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            group.create_task(one(number))
            due, number = due + 1 / RATE, number + 1


async def probe(client: aiohttp.ClientSession, url: str, phase: Phase) -> None:
    """Request ``/ping`` again and again, until cancelled."""
    while True:
        began = time.perf_counter()
        async with client.get(f"{url}/ping") as response:
            await response.read()
        phase.probed_s.append(time.perf_counter() - began)
        await asyncio.sleep(PROBE_EVERY_S)


async def sample(pid: int, phase: Phase) -> None:
    """Record the gateway's memory, until cancelled."""
    process = psutil.Process(pid)
    while True:
        phase.memory.append(process.memory_info().rss)
        await asyncio.sleep(SAMPLE_EVERY_S)


async def observe(
    client: aiohttp.ClientSession, url: str, pid: int, request: Request, seconds: float
) -> Phase:
    """Run one phase."""
    phase = Phase()
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(probe(client, url, phase)), group.create_task(sample(pid, phase))]
        await steady(request, phase, seconds)
        for task in watching:
            task.cancel()
    return phase


async def flood(url: str, key: str, concurrency: int, size: int) -> None:
    """Tokenize until killed; print the counts of the answers' statuses, one line per second."""
    body = json.dumps({"prompt": (_WORDS * (size // len(_WORDS) + 1))[:size], "return_token_strs": True})
    statuses: Counter[str] = Counter()

    async def caller(client: aiohttp.ClientSession, place: int) -> None:
        number = 0
        while True:
            headers = {"idempotency-key": f"{place}-{number}", "content-type": "application/json"}
            try:
                async with client.post(f"{url}/tokenize", data=body.encode(), headers=headers) as answer:
                    await answer.read()
                    statuses[str(answer.status)] += 1
                    waits = float(answer.headers.get("retry-after", "0"))
            except (aiohttp.ClientError, TimeoutError) as error:
                statuses[type(error).__name__], waits = statuses[type(error).__name__] + 1, 0.0
            number += 1
            await asyncio.sleep(min(waits, 0.1))

    async def report() -> None:
        while True:
            await asyncio.sleep(0.5)
            print(json.dumps(statuses), flush=True)

    async with (
        aiohttp.ClientSession(
            headers={"authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(report())
        for place in range(concurrency):
            group.create_task(caller(client, place))


async def measure(url: str, pid: int, folder: Path, concurrency: int, size: int, seconds: float) -> Result:
    """Measure before, during and after the flood."""
    seen = CallerResults()

    async def request(number: int) -> None:
        await ask(client, url, f"session-{number}", seen)

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {"authorization": f"Bearer {KEY}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as client:
        await ready(client, url)
        async with client.post(f"{url}/admin/keys", json={"tenant": "flood"}) as response:
            key = (await response.json())["key"]
        await observe(client, url, pid, request, SETTLE_S)
        alone = await observe(client, url, pid, request, seconds)
        log = folder / "flood.log"
        command = python_module("benchmarks.tokenize_flood", "--attack", url, "--key", key)
        command += ("--concurrency", str(concurrency), "--bytes", str(size))
        with started(command, log):
            await asyncio.sleep(SETTLE_S)
            flooded = await observe(client, url, pid, request, seconds)
            lines = log.read_text().splitlines()
        after = await observe(client, url, pid, request, 2 * SETTLE_S)
    mib = 1 / (1 << 20)
    return Result(
        p50_alone_ms=alone.quantile(0.5),
        p99_alone_ms=alone.quantile(0.99),
        p50_ms=flooded.quantile(0.5),
        p99_ms=flooded.quantile(0.99),
        longest_ping_alone_ms=max(alone.probed_s) * 1e3,
        longest_ping_ms=max(flooded.probed_s) * 1e3,
        failed=len(seen.failures),
        memory_before_mib=alone.memory[-1] * mib,
        memory_most_mib=max(flooded.memory) * mib,
        memory_after_mib=after.memory[-1] * mib,
        tokenized=json.loads(lines[-1]) if lines else {},
    )


@contextmanager
def gateway(folder: Path) -> Iterator[tuple[str, int]]:
    """Start one gateway in front of a fake worker; yield its address and process."""
    with worker(folder) as port:
        write_settings(folder, f"sqlite:///{folder}/state.db", port)
        with one_gateway(folder, 0) as url:
            [found] = [
                one
                for one in psutil.Process().children(recursive=True)
                if "ops.cli" in " ".join(one.cmdline())
            ]
            yield url, found.pid


def main(
    concurrency: Annotated[int, typer.Option(min=1, help="Callers that tokenize.")] = 12,
    bytes: Annotated[int, typer.Option(min=1, help="Bytes of a text.")] = 2_400_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of each phase.")] = 15.0,
    attack: Annotated[str, typer.Option(hidden=True)] = "",
    key: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, and print the figures."""
    if attack:
        asyncio.run(flood(attack, key, concurrency, bytes))
        return
    with tempfile.TemporaryDirectory() as temporary, gateway(Path(temporary)) as (url, pid):
        result = asyncio.run(measure(url, pid, Path(temporary), concurrency, bytes, seconds))
    table = Table(title=f"{concurrency} × {bytes:,} bytes, Python {sys.version.split()[0]}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
