"""Does the ledger lose anything? A gateway killed every few seconds, its PostgreSQL crashed twice meanwhile.

    python -m benchmarks.ledger_kill                      # 10,000 answers
    python -m benchmarks.ledger_kill --database sqlite --requests 2000
    python -m benchmarks.ledger_kill --cost               # throughput and time to the first token

Callers ask, half of them for streams, until so many have a whole answer, each under a label of its own; who
loses the connection asks again under a new label. At the end the gateway is killed once more and started, and
every label that was answered must have exactly one row with the very tokens that its caller was told.

For the cost one gateway after another answers the same callers, with ``ledger.durability`` in turn
``memory`` (no journal), ``relaxed``, ``group`` and ``strict``, several rounds in an order that changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
import yaml
from rich.console import Console
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.forwarding.gateways import REPOSITORY, python_module
from benchmarks.forwarding.processes import free_port, started
from benchmarks.ledger_postgres import Postgres, postgres
from benchmarks.ledger_worker import MODEL
from benchmarks.sse import json_events

KEY = "sk-ledger-benchmark-0123456789abcdef"
START_S = 60.0
# A caller that lost its answer asks again after so long; the gateway takes some seconds to start.
PAUSE_S = 0.1
OUTAGE_S = 4.0
# Reports may lag 5 s behind the answers (the public surface), and adoption takes up to 2 s of that.
SETTLE_S = 30.0
DURABILITIES = ("memory", "relaxed", "group", "strict")

Tokens = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the answers; ``missing``, ``doubled`` and ``different`` are to be 0."""

    answered: int
    missing: int
    doubled: int
    different: int
    callers_tokens: tuple[int, ...]
    ledger_tokens: tuple[int, ...]
    unanswered_with_row: int
    broken_off: int
    kills: int
    outages: int
    seconds: float

    @property
    def good(self) -> bool:
        """Whether nothing was lost or billed wrongly."""
        wrong = self.missing or self.doubled or self.different
        return not wrong and self.callers_tokens == self.ledger_tokens


@dataclass
class Gateway:
    """A gateway process that can be killed, and started again with the same files and port."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    kills: int = 0

    @property
    def url(self) -> str:
        """Return the gateway's address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process; the gateway is ready some seconds later."""
        with (self.folder / "gateway.log").open("ab") as log:
            self.process = subprocess.Popen(
                python_module("ops.cli", "serve", "--config", self.folder / "sluice.yaml"),
                cwd=REPOSITORY,
                env={**os.environ, "SLUICE_ADMIN_KEY": KEY},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used, over all threads."""
        if self.process is None:
            return 0.0
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Stop the process with a signal, and wait for its end."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(30)
            self.process = None
            self.kills += how is signal.SIGKILL


@dataclass
class Callers:
    """The usage that callers got, by label."""

    answered: dict[str, Tokens] = field(default_factory=dict)
    broken_off: int = 0
    first_token_s: list[float] = field(default_factory=list)


def configure(
    folder: Path,
    *,
    port: int,
    worker: int,
    ledger: str,
    durability: str = "group",
    state: str = "memory://",
) -> None:
    """Write the configuration files of a gateway."""
    settings = {
        "server": {"host": "127.0.0.1", "port": port},
        "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
        "backends": {
            "worker": {
                "kind": "openai",
                "base_urls": [f"http://127.0.0.1:{worker}/v1"],
                "model": MODEL,
                "price": {"input_usd_per_million": 1.0, "output_usd_per_million": 3.0},
            }
        },
        "state": {"url": state},
        "ledger": {"url": ledger, "durability": durability, "journal_folder": str(folder / "journal")},
        "routing": {"file": str(folder / "routing.yaml")},
        "admission": {"max_wait_ms": 600_000},
    }
    routes = {"main": {"backends": [{"name": "worker", "weight": 100}], "fallback": []}}
    (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": routes}))


@contextlib.contextmanager
def worker(folder: Path, token_s: float = 0.0) -> Iterator[int]:
    """Start a worker; yield its port."""
    port = free_port()
    with started(python_module("benchmarks.ledger_worker", port, token_s), folder / "worker.log"):
        yield port


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the gateway accepts requests."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    label: str,
    callers: Callers,
    *,
    stream: bool,
    headers: Mapping[str, str],
) -> bool:
    """Send one request; return whether a whole answer came."""
    body = {
        "request_id": label,
        "route": "main",
        "stream": stream,
        "messages": [{"role": "user", "content": f"question {label}"}],
    }
    began, usage = time.perf_counter(), None
    try:
        async with session.post(f"{url}/v1/generate", json=body, headers=headers) as response:
            if response.status == 200 and not stream:
                usage = (await response.json())["usage"]
            elif response.status == 200:
                async for event in json_events(response.content.iter_any()):
                    if event.get("type") == "token" and event["delta"]:
                        callers.first_token_s.append(time.perf_counter() - began)
                        began = float("inf")
                    usage = event["usage"] if event.get("type") == "done" else None
                    if usage is not None:
                        break
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
    if usage is None:
        return False
    callers.answered[label] = (usage["input_tokens"], usage["output_tokens"], usage["cached_tokens"])
    return True


async def until_answered(
    session: aiohttp.ClientSession, url: str, callers: Callers, requests: int, at_once: int
) -> None:
    """Send requests until ``requests`` of them have their answers."""
    numbers, headers = iter(range(requests)), {"authorization": f"Bearer {KEY}"}

    async def caller() -> None:
        for number in numbers:
            for attempt in itertools.count():
                label = f"r{number}-{attempt}"
                if await ask(session, url, label, callers, stream=number % 2 == 0, headers=headers):
                    break
                callers.broken_off += 1
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(caller())


async def keep_killing(
    session: aiohttp.ClientSession, gateway: Gateway, every_s: float, rng: random.Random
) -> None:
    """Kill and restart the gateway again and again, at random times."""
    while True:
        await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
        gateway.kill()
        gateway.start()
        await ready(session, gateway.url)


async def crash_twice(server: Postgres, callers: Callers, requests: int, outage_s: float) -> None:
    """Crash the database for some seconds when a third, and again when two thirds, are answered."""
    for share in (1 / 3, 2 / 3):
        while len(callers.answered) < requests * share:  # noqa: ASYNC110 - what callers were told is a plain dict
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.crash)
        await asyncio.sleep(outage_s)
        await asyncio.to_thread(server.start)


async def rows_of(ledger: str) -> dict[str, list[Tokens]]:
    """The ledger's rows by label."""
    engine = create_async_engine(ledger)
    query = text("SELECT request_id, input_tokens, output_tokens, cached_tokens FROM generations")
    found: dict[str, list[Tokens]] = {}
    try:
        async with engine.connect() as connection:
            for label, *tokens in await connection.execute(query):
                found.setdefault(label, []).append((tokens[0], tokens[1], tokens[2]))
    finally:
        await engine.dispose()
    return found


async def run(
    ledger: str,
    folder: Path,
    *,
    server: Postgres | None,
    requests: int,
    kill_every_s: float,
    at_once: int,
    seed: int,
    outage_s: float = OUTAGE_S,
) -> Result:
    """Run the whole benchmark once."""
    began = time.perf_counter()
    callers, outages = Callers(), 0 if server is None else 2
    gateway = Gateway(folder, free_port())
    timeout = aiohttp.ClientTimeout(total=30)
    with worker(folder) as port:
        configure(folder, port=gateway.port, worker=port, ledger=ledger)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            gateway.start()
            try:
                await ready(session, gateway.url)
                async with asyncio.TaskGroup() as tasks:
                    killer = tasks.create_task(
                        keep_killing(session, gateway, kill_every_s, random.Random(seed))
                    )
                    crashes = (
                        None
                        if server is None
                        else tasks.create_task(crash_twice(server, callers, requests, outage_s))
                    )
                    await until_answered(session, gateway.url, callers, requests, at_once)
                    if crashes is not None:
                        await crashes
                    killer.cancel()
                gateway.kill()
                gateway.start()
                await ready(session, gateway.url)
                rows = await settled(ledger, callers)
            finally:
                gateway.kill(signal.SIGTERM)
    found = {label: rows.get(label, []) for label in callers.answered}
    return Result(
        answered=len(found),
        missing=sum(not one for one in found.values()),
        doubled=sum(len(one) > 1 for one in rows.values()),
        different=sum(bool(one) and one[0] != callers.answered[label] for label, one in found.items()),
        callers_tokens=_sums(callers.answered.values()),
        ledger_tokens=_sums(tokens for one in found.values() for tokens in one),
        unanswered_with_row=len(rows.keys() - callers.answered.keys()),
        broken_off=callers.broken_off,
        kills=gateway.kills,
        outages=outages,
        seconds=round(time.perf_counter() - began, 1),
    )


async def settled(ledger: str, callers: Callers) -> dict[str, list[Tokens]]:
    """Return the rows once those of all answers exist, or after ``SETTLE_S`` seconds."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        rows = await rows_of(ledger)
        if callers.answered.keys() <= rows.keys() or time.perf_counter() > deadline:
            return rows
        await asyncio.sleep(0.2)


def _sums(tokens: Any) -> tuple[int, ...]:
    return tuple(map(sum, zip(*tokens, strict=True))) or (0, 0, 0)


# The cost of durability


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the rounds; ratios are to ``memory`` in the same round.

    ``cpu_ms`` is CPU per request of the gateway's process alone: other load on the machine changes it least.
    """

    durability: str
    requests_per_s: float
    first_token_ms: float
    cpu_ms: float
    cpu_ratio: float
    throughput_ratio: float
    first_token_ratio: float


async def costs(folder: Path, *, rounds: int, requests: int, at_once: int, seed: int) -> list[Cost]:
    """Measure every durability in every round, in random order."""
    rng = random.Random(seed)
    speeds: dict[str, list[float]] = {name: [] for name in DURABILITIES}
    firsts: dict[str, list[float]] = {name: [] for name in DURABILITIES}
    cpu: dict[str, list[float]] = {name: [] for name in DURABILITIES}
    with worker(folder) as port, contextlib.ExitStack() as ending:
        gateways: dict[str, Gateway] = {}
        for name in DURABILITIES:
            (folder / name).mkdir()
            gateway = gateways[name] = Gateway(folder / name, free_port())
            url = f"sqlite+aiosqlite:///{folder}/{name}/ledger.db"
            configure(folder / name, port=gateway.port, worker=port, ledger=url, durability=name)
            gateway.start()
            ending.callback(gateway.kill, signal.SIGTERM)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for gateway in gateways.values():
                await ready(session, gateway.url)
                await until_answered(session, gateway.url, Callers(), requests // 4, at_once)  # warm-up
            for _ in range(rounds):
                for name in rng.sample(DURABILITIES, len(DURABILITIES)):
                    callers, began, cpu_began = Callers(), time.perf_counter(), gateways[name].cpu_s()
                    await until_answered(session, gateways[name].url, callers, requests, at_once)
                    cpu[name].append((gateways[name].cpu_s() - cpu_began) / len(callers.answered) * 1000)
                    speeds[name].append(len(callers.answered) / (time.perf_counter() - began))
                    firsts[name].append(statistics.median(callers.first_token_s) * 1000)
    return [
        Cost(
            name,
            round(statistics.median(speeds[name]), 1),
            round(statistics.median(firsts[name]), 2),
            round(statistics.median(cpu[name]), 3),
            round(statistics.median(a / b for a, b in zip(cpu[name], cpu["memory"], strict=True)), 3),
            round(statistics.median(a / b for a, b in zip(speeds[name], speeds["memory"], strict=True)), 3),
            round(statistics.median(a / b for a, b in zip(firsts[name], firsts["memory"], strict=True)), 3),
        )
        for name in DURABILITIES
    ]


def main(
    requests: Annotated[int, typer.Option(min=1, help="Answers that there shall be.")] = 10_000,
    kill_every: Annotated[float, typer.Option(min=0.1, help="Seconds between two kills, about.")] = 4.0,
    at_once: Annotated[int, typer.Option(min=1, help="Callers.")] = 32,
    database: Annotated[str, typer.Option(help="postgresql or sqlite.")] = "postgresql",
    cost: Annotated[bool, typer.Option(help="Measure what it costs instead.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="For --cost.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Kill, count, compare; exit code 1 when something was lost, doubled or different."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        if cost:
            found = asyncio.run(costs(folder, rounds=rounds, requests=requests, at_once=at_once, seed=seed))
            console.print_json(json.dumps([asdict(one) for one in found]))
            return
        server = ending.enter_context(postgres()) if database == "postgresql" else None
        url = f"sqlite+aiosqlite:///{folder}/ledger.db" if server is None else server.url
        result = asyncio.run(
            run(
                url,
                folder,
                server=server,
                requests=requests,
                kill_every_s=kill_every,
                at_once=at_once,
                seed=seed,
            )
        )
    if as_json:
        print(json.dumps({**asdict(result), "good": result.good}))
    else:
        for field_name, value in asdict(result).items():
            console.print(f"{field_name:>20}  {value}", highlight=False)
    raise typer.Exit(0 if result.good else 1)


if __name__ == "__main__":
    typer.run(main)
