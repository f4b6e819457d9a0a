"""How much longer do callers wait when every request is shadowed?

    python -m benchmarks.shadow_cost

There are one gateway, one fake worker under two names, and two routes that differ only in ``shadow``.
Streamed requests come at random times at a steady rate. Blocks of the two routes alternate in changing order,
and a block begins only when the shadows of the previous one are done, so that each block has only its own
work. The ratio of the two routes is what counts; its interval is a bootstrap over blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import KEY, python_module
from benchmarks.forwarding.processes import free_port, started
from benchmarks.routing_propagation import ready
from gateway.shadow.statistics import quantile

ROUTES = ("plain", "shadowed")
DRAIN_TIMEOUT_S = 60.0
RESAMPLES = 1_000
Times = tuple[float, float]  # to the first token and to the end, ms
PROMPT = "What would you recommend to somebody who liked Vinland Saga? " * 20


@contextlib.contextmanager
def running(folder: Path, step_ms: float, concurrency: int) -> Iterator[tuple[str, str]]:
    """Start the worker and the gateway; yield their addresses."""
    worker_port, port = free_port(), free_port()
    backends = {
        name: {
            "kind": "openai",
            "base_urls": [f"http://127.0.0.1:{worker_port}/v1"],
            "model": name,
            "metrics_path": None,
        }
        for name in ("a", "b")
    }
    route: dict[str, Any] = {"backends": [{"name": "a", "weight": 100}], "fallback": []}
    routes = {"plain": route, "shadowed": {**route, "shadow": {"backend": "b", "sample": 1.0}}}
    settings = {
        "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
        "backends": backends,
        "shadow": {"concurrency": concurrency, "queue": 2_000},
        "routing": {"file": str(folder / "routing.yaml")},
        "state": {"url": f"sqlite:///{folder}/state.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{folder}/ledger.db"},
    }
    (folder / "routing.yaml").write_text(json.dumps({"routes": routes}))
    (folder / "sluice.yaml").write_text(json.dumps(settings))
    env = {"SLUICE_ADMIN_KEY": KEY, "SLUICE_SERVER__PORT": str(port)}
    with (
        started(python_module("benchmarks.forwarding.worker", worker_port, "a", "b"), folder / "worker.log"),
        started(
            python_module("ops.cli", "serve", "--config", folder / "sluice.yaml"),
            folder / "gateway.log",
            env,
        ),
    ):
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{worker_port}"


async def ask(client: aiohttp.ClientSession, url: str, route: str, number: int) -> Times:
    """Send one streamed request; return its times."""
    text = f"{number}: {PROMPT}"
    body = {"route": route, "messages": [{"role": "user", "content": text}], "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.post(f"{url}/v1/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not first and line.startswith(b"data:"):
                first = time.perf_counter()
            if b'"type":"error"' in line:
                raise RuntimeError(line.decode()[:200])
    return (first - began) * 1000, (time.perf_counter() - began) * 1000


async def block(
    client: aiohttp.ClientSession, url: str, route: str, *, seconds: float, rate: float, rng: random.Random
) -> list[Times]:
    """Send requests at random times; return their times."""
    async with asyncio.TaskGroup() as tasks:
        asked, until, number = [], time.monotonic() + seconds, 0
        while time.monotonic() < until:
            number += 1
            asked.append(tasks.create_task(ask(client, url, route, number)))
            await asyncio.sleep(rng.expovariate(rate))
    return [one.result() for one in asked]


async def shadows(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the shadow's metrics, once none of its requests waits or runs."""
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        while True:
            async with client.get(f"{url}/metrics") as response:
                text = await response.text()
            found = {
                name: float(value)
                for name, value in re.findall(r"^sluice_shadow_(\S+) ([0-9.e+-]+)$", text, re.MULTILINE)
            }
            if not found["waiting"] and not found["active"]:
                return found
            await asyncio.sleep(0.1)


async def measure(
    folder: Path, *, pairs: int, seconds: float, rate: float, step_ms: float, concurrency: int, seed: int
) -> tuple[dict[str, list[list[Times]]], dict[str, float]]:
    """Return the blocks of each route, and the counts of the shadows."""
    rng, blocks = random.Random(seed), {route: list[list[Times]]() for route in ROUTES}
    headers = {"authorization": f"Bearer {KEY}"}
    with running(folder, step_ms, concurrency) as (url, worker):
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(60)) as client:
            await ready(client, url)
            async with client.post(f"{worker}/control", json={"step_ms": step_ms}) as response:
                response.raise_for_status()
            for route in ROUTES:
                await block(client, url, route, seconds=2.0, rate=rate, rng=rng)
                before = await shadows(client, url)
            for turn in range(pairs):
                for route in ROUTES if turn % 2 else ROUTES[::-1]:
                    blocks[route].append(await block(client, url, route, seconds=seconds, rate=rate, rng=rng))
                    after = await shadows(client, url)
    return blocks, {name: value - before.get(name, 0.0) for name, value in after.items()}


def figure(blocks: list[list[Times]], which: int, share: float) -> float:
    """A quantile over all requests of some blocks."""
    return quantile(sorted(times[which] for one in blocks for times in one), share)


def main(
    pairs: Annotated[int, typer.Option(help="Blocks of each route.")] = 10,
    seconds: Annotated[float, typer.Option(help="Of a block.")] = 5.0,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 15.0,
    step_ms: Annotated[float, typer.Option(help="Between two tokens of the worker.")] = 2.0,
    concurrency: Annotated[int, typer.Option(help="shadow.concurrency; 2 would lag behind")] = 8,
    seed: int = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure both routes, and print them next to each other."""
    with tempfile.TemporaryDirectory() as folder:
        blocks, done = asyncio.run(
            measure(
                Path(folder),
                pairs=pairs,
                seconds=seconds,
                rate=rate,
                step_ms=step_ms,
                concurrency=concurrency,
                seed=seed,
            )
        )
    rng, found = random.Random(seed), []
    for which, name in enumerate(("first token", "whole answer")):
        for share in (0.5, 0.99):
            plain, shadowed = (figure(blocks[route], which, share) for route in ROUTES)
            ratios = []
            for _ in range(RESAMPLES):
                picked = [rng.choices(blocks[route], k=pairs) for route in ROUTES]
                ratios.append(figure(picked[1], which, share) / figure(picked[0], which, share))
            ratios.sort()
            found.append(
                {
                    "of": name,
                    "share": share,
                    "plain_ms": round(plain, 2),
                    "shadowed_ms": round(shadowed, 2),
                    "ratio": round(shadowed / plain, 4),
                    "low": round(quantile(ratios, 0.025), 4),
                    "high": round(quantile(ratios, 0.975), 4),
                }
            )
    requests = {route: sum(map(len, blocks[route])) for route in ROUTES}
    results = {
        name: int(value) for name, value in done.items() if name.startswith("requests_total") and value
    }
    if as_json:
        print(json.dumps({"requests": requests, "shadows": results, "figures": found}, indent=2))
        return
    table = Table(title=f"{requests['plain']} requests without and {requests['shadowed']} with a shadow each")
    for column in ("", "without, ms", "with, ms", "ratio", "95 %"):
        table.add_column(column, justify="right" if column else "left")
    for one in found:
        table.add_row(
            f"{one['of']}, p{100 * float(str(one['share'])):g}",
            *(str(one[key]) for key in ("plain_ms", "shadowed_ms", "ratio")),
            f"{one['low']} … {one['high']}",
        )
    console = Console(width=110)
    console.print(table)
    console.print(f"shadows: {results}", markup=False)


if __name__ == "__main__":
    typer.run(main)
