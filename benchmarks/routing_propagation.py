"""How soon a routing change is in force in every gateway process under load, and its effect on requests.

    python -m benchmarks.routing_propagation --processes 8 --changes 50
    python -m benchmarks.routing_propagation --url redis://127.0.0.1:6379/9

Gateways without an engine are in front of one fake worker under two names, and callers send requests to each
of them all the time. Each change goes to a random gateway: a configuration with other weights and its own
``reserve``, or a rollback. Its time in a process is from the call of the admin API until that process reports
it in force, by the machine's clock. An answer's ``generation_reserve`` identifies the revision of its budget,
its backend the revision of its routing. When the weights of the first would not have chosen that backend for
the session, the request saw two revisions, or the processes do not split alike. The store must be empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import python_module
from benchmarks.forwarding.processes import free_port, started
from gateway.routing.rank import draw

KEY = "sk-routing-benchmark-0123456789abcdef"
ROUTE = "chat"
SHARES = (0.0, 5.0, 25.0, 50.0, 75.0, 100.0)
BASE_RESERVE = 100
SESSIONS = 200
START_TIMEOUT_S = 180.0
IN_FORCE_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.02
# Every third change is a rollback; changes come 50 to 300 ms apart, so at any phase of the watchers.
ROLLBACK_EVERY = 3
GAP_S = (0.05, 0.3)
CANARY_PERCENT = 5.0
# 95 % of a normal distribution lie within this many standard deviations.
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Result:
    """Times in ms, over changes and processes.

    ``split_*``: the canary's share of sessions in percent, and the 95 % interval around the configured share.
    """

    store: str
    processes: int
    changes: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    call_p50_ms: float
    requests: int
    failed: int
    saw_two_revisions: int
    split_percent: float
    split_low: float
    split_high: float
    same_session_same_backend_percent: float


@dataclass
class CallerResults:
    """The answers and failures that callers got."""

    answers: list[tuple[str, str, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def config(canary: float, number: int) -> dict[str, Any]:
    """Return the content of a revision, which its reserve identifies."""
    backends = [{"name": "a", "weight": 100 - canary}, {"name": "b", "weight": canary}]
    return {"routes": {ROUTE: {"backends": backends, "fallback": [], "reserve": BASE_RESERVE + number}}}


def expected(canary: float, session: str) -> str:
    """Return the backend that these weights choose for the session."""
    return draw(ROUTE, session, [one for one in (("a", 100 - canary), ("b", canary)) if one[1] > 0])


def write_settings(folder: Path, url: str, worker_port: int) -> None:
    """Write the settings of all gateways: one worker under two names, and the state store at ``url``."""
    settings = {
        "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
        "backends": {
            name: {
                "kind": "openai",
                "base_urls": [f"http://127.0.0.1:{worker_port}/v1"],
                "model": name,
                "metrics_path": None,
            }
            for name in ("a", "b")
        },
        "routing": {"file": str(folder / "routing.yaml")},
        "state": {"url": url, "cache_dir": str(folder / "copies")},
    }
    (folder / "routing.yaml").write_text(json.dumps(config(0.0, 0)))
    (folder / "sluice.yaml").write_text(json.dumps(settings))


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[int]:
    """Start the fake worker; yield its port."""
    port = free_port()
    with started(python_module("benchmarks.forwarding.worker", port, "a", "b"), folder / "worker.log"):
        yield port


@contextlib.contextmanager
def one_gateway(folder: Path, number: int) -> Iterator[str]:
    """Start a gateway with the folder's settings, without waiting for it; yield its address."""
    port = free_port()
    env = {
        "SLUICE_ADMIN_KEY": KEY,
        "SLUICE_SERVER__PORT": str(port),
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger-{number}.db",
    }
    command = python_module("ops.cli", "serve", "--config", folder / "sluice.yaml")
    with started(command, folder / f"gateway-{number}.log", env):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def fleet(folder: Path, url: str, processes: int) -> Iterator[list[str]]:
    """Start the worker and the gateways; yield the addresses of the gateways."""
    with contextlib.ExitStack() as stack:
        write_settings(folder, url, stack.enter_context(worker(folder)))
        yield [stack.enter_context(one_gateway(folder, number)) for number in range(processes)]


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the gateway accepts requests."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def ask(client: aiohttp.ClientSession, url: str, session: str, seen: CallerResults) -> str | None:
    """Send one request; return the backend that answered."""
    body = {"route": ROUTE, "session_id": session, "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with client.post(f"{url}/v1/generate", json=body) as response:
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.failures.append(type(error).__name__)
        return None
    if response.status != 200 or answer["fallback"] is not None:
        seen.failures.append(json.dumps(answer)[:200])
        return None
    backend: str = answer["backend_version"]
    seen.answers.append((session, backend, answer["budget"]["generation_reserve"] - BASE_RESERVE))
    return backend


async def in_force(client: aiohttp.ClientSession, url: str, revision: int) -> float:
    """Return when ``revision`` came into force there, as a Unix time; infinite when already replaced."""
    async with asyncio.timeout(IN_FORCE_TIMEOUT_S):
        while True:
            async with client.get(f"{url}/admin/routing") as response:
                shown = await response.json()
            if shown["revision"] >= revision:
                since = datetime.fromisoformat(shown["in_force_since"]).timestamp()
                return since if shown["revision"] == revision else math.inf
            await asyncio.sleep(LOOK_EVERY_S)


async def change(
    client: aiohttp.ClientSession, urls: list[str], number: int, rng: random.Random, shares: dict[int, float]
) -> tuple[list[float], float]:
    """Make one change; return the seconds until it was in force in each process, and those of the call."""
    url = rng.choice(urls)
    begun, began = time.time(), time.monotonic()
    if number % ROLLBACK_EVERY == 0:
        sent = client.post(f"{url}/admin/routing/rollback", json={})
    else:
        shares[number] = rng.choice(SHARES)
        body = {"config": config(shares[number], number), "comment": f"change {number}"}
        sent = client.put(f"{url}/admin/routing", json=body)
    async with sent as response:
        done = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{url}: {done}")
    call_s = time.monotonic() - began
    times = await asyncio.gather(*(in_force(client, one, done["revision"]) for one in urls))
    return [at - begun for at in times], call_s


async def measure(urls: list[str], store: str, changes: int, callers: int, split: int, seed: int) -> Result:
    """Run the benchmark over running gateways."""
    rng, seen, shares = random.Random(seed), CallerResults(), {0: 0.0}
    headers = {"authorization": f"Bearer {KEY}"}
    times: list[float] = []
    calls: list[float] = []
    async with aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=30), connector=aiohttp.TCPConnector(limit=0)
    ) as client:
        await asyncio.gather(*(ready(client, url) for url in urls))
        over = asyncio.Event()

        async def caller(url: str, own: random.Random) -> None:
            while not over.is_set():
                await ask(client, url, f"session-{own.randrange(SESSIONS)}", seen)

        async with asyncio.TaskGroup() as group:
            for place in range(callers * len(urls)):
                group.create_task(caller(urls[place % len(urls)], random.Random(seed + place)))
            for number in range(1, changes + 1):
                await asyncio.sleep(rng.uniform(*GAP_S))
                took, call_s = await change(client, urls, number, rng, shares)
                times += took
                calls.append(call_s)
            over.set()
        two = sum(expected(shares[mark], session) != backend for session, backend, mark in seen.answers)
        share, same = await canary(client, urls, split, changes + 1, seen)
    times.sort()
    half = 100 * Z95 * math.sqrt(CANARY_PERCENT / 100 * (1 - CANARY_PERCENT / 100) / split)
    return Result(
        store=store,
        processes=len(urls),
        changes=changes,
        p50_ms=statistics.median(times) * 1e3,
        p99_ms=times[min(len(times) - 1, int(len(times) * 0.99))] * 1e3,
        max_ms=times[-1] * 1e3,
        call_p50_ms=statistics.median(calls) * 1e3,
        requests=len(seen.answers) + len(seen.failures),
        failed=len(seen.failures),
        saw_two_revisions=two,
        split_percent=share,
        split_low=CANARY_PERCENT - half,
        split_high=CANARY_PERCENT + half,
        same_session_same_backend_percent=same,
    )


async def canary(
    client: aiohttp.ClientSession, urls: list[str], sessions: int, number: int, seen: CallerResults
) -> tuple[float, float]:
    """Return the percentages of new sessions on the canary, and with the same backend at two processes."""
    body = {"config": config(CANARY_PERCENT, number)}
    async with client.put(f"{urls[0]}/admin/routing", json=body) as response:
        revision = (await response.json())["revision"]
    await asyncio.gather(*(in_force(client, url, revision) for url in urls))
    found: dict[str, set[str | None]] = {}
    for turn in range(2):
        for first in range(0, sessions, len(urls)):
            names = [f"new-{place}" for place in range(first, min(first + len(urls), sessions))]
            asked = (
                ask(client, urls[(place + turn) % len(urls)], name, seen) for place, name in enumerate(names)
            )
            for name, backend in zip(names, await asyncio.gather(*asked), strict=True):
                found.setdefault(name, set()).add(backend)
    on = sum("b" in backends for backends in found.values())
    same = sum(len(backends) == 1 for backends in found.values())
    return 100 * on / sessions, 100 * same / sessions


def shown(result: Result) -> Mapping[str, str]:
    """The figures as a table shows them."""
    return {
        name: f"{value:.2f}" if isinstance(value, float) else str(value)
        for name, value in asdict(result).items()
    }


def main(
    url: Annotated[str, typer.Option(help="A state store; default: a SQLite file of its own.")] = "",
    processes: Annotated[int, typer.Option(min=1, max=64)] = 8,
    changes: Annotated[int, typer.Option(min=1, max=10_000)] = 50,
    callers: Annotated[int, typer.Option(min=1, max=64, help="For each process.")] = 1,
    split: Annotated[int, typer.Option(min=10, max=100_000, help="Sessions of the canary's share.")] = 1_000,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and print; exit code 1 when a request failed or saw two revisions."""
    with tempfile.TemporaryDirectory() as folder:
        state = url or f"sqlite:///{folder}/state.db"
        with fleet(Path(folder), state, processes) as urls:
            result = asyncio.run(measure(urls, state.split(":")[0], changes, callers, split, seed))
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        table = Table("figure", "value", title=f"load average {os.getloadavg()[0]:.1f}")
        for name, value in shown(result).items():
            table.add_row(name, value)
        Console().print(table)
    if result.failed or result.saw_two_revisions:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
