"""What gateway processes under load do while their state store is down, and how soon they agree afterwards.

    python -m benchmarks.store_outage
    python -m benchmarks.store_outage --case redis-lost --processes 4 --away 5

Gateways in front of one fake worker get requests at a steady rate. Then the store fails: Redis by SIGKILL
(with an append-only file, so that it comes back with its data; or without, so that it comes back empty), the
SQLite file because another process holds ``BEGIN EXCLUSIVE``. Meanwhile an operator tries changes at every
gateway, and one more gateway starts. When the store is back, the first accepted change is followed into every
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.processes import free_port, started
from benchmarks.routing_propagation import (
    KEY,
    CallerResults,
    ask,
    config,
    fleet,
    in_force,
    one_gateway,
    ready,
)

SESSIONS = 200
SHARE = 25.0
"""Canary share of the revision in force when the store fails; the routing file says 0."""
TRY_EVERY_S = 0.05
STEADY_S = 2.0
"""Seconds of load before the store fails, and after all processes agree again."""
BACK_TIMEOUT_S = 20.0
# Longest wait for an operator's change, in seconds; longer than any gateway takes to refuse one.
ORDER_TIMEOUT_S = 15.0


class Case(StrEnum):
    """How the store fails and comes back."""

    REDIS = "redis"
    """Killed; its append-only file has everything."""
    REDIS_LOST = "redis-lost"
    """Killed; it comes back empty, because nothing was on disk."""
    SQLITE = "sqlite"
    """Locked for writing by another process."""


class StoreOutage(Protocol):
    """The store, and how it is made to fail and restored. Blocking; called from threads."""

    url: str

    def take(self) -> None:
        """Make the store fail."""

    def give_back(self) -> None:
        """Restore the store, and return once it answers."""


class RedisOutage:
    """A Redis process of this run."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._folder = folder
        self._port = free_port()
        self._durable = durable
        self._running = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def take(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def give_back(self) -> None:
        """Start it with the data on disk."""
        words = ["redis-server", "--port", str(self._port), "--bind", "127.0.0.1", "--save", ""]
        words += ["--dir", str(self._folder), "--appendfsync", "always"]
        words += ["--appendonly", "yes" if self._durable else "no"]
        self._process = self._running.enter_context(started(words, self._folder / "redis.log"))
        import redis

        end = time.monotonic() + BACK_TIMEOUT_S
        with redis.Redis(port=self._port) as client:
            while True:
                with contextlib.suppress(redis.RedisError):
                    if client.ping():
                        return
                if time.monotonic() > end:
                    raise RuntimeError((self._folder / "redis.log").read_text())
                time.sleep(0.01)

    def close(self) -> None:
        """Stop it."""
        self._running.close()


class SqliteOutage:
    """A SQLite file that this process locks; the gateways are other processes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.db"
        self._lock: sqlite3.Connection | None = None
        self.url = f"sqlite:///{self._path}"

    def take(self) -> None:
        """Lock the file, like a writer that never commits."""
        self._lock = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=10)
        self._lock.execute("BEGIN EXCLUSIVE")

    def give_back(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()


@contextlib.contextmanager
def store(case: Case, folder: Path) -> Iterator[StoreOutage]:
    """Start the store of the case."""
    if case is Case.SQLITE:
        yield SqliteOutage(folder)
        return
    if shutil.which("redis-server") is None:
        raise typer.BadParameter("redis-server is not installed", param_hint="--case")
    redis = RedisOutage(folder, durable=case is Case.REDIS)
    try:
        redis.give_back()
        yield redis
    finally:
        redis.close()


@dataclass
class Orders:
    """The answers to changes while the store was down: status and code, and the milliseconds."""

    answers: Counter[str] = field(default_factory=Counter)
    times_ms: list[float] = field(default_factory=list)
    message: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """Times in ms.

    Args:
        p99_*: of requests, by phase.
        failed: requests without a complete answer, over the whole run.
        orders: the answers to changes while the store was down.
        late_start_ms: until a gateway started meanwhile accepted requests; ``late_revision``: its revision.
        writable_ms: from the store's return to the first accepted change; ``None``: there was none.
        agreed_ms: until that change was in force in every process, including the late one.
        wrong: answers by a revision that should not be in force.
        after_lost: the answer to a change and the gauge ``in_step`` after the store has lost its records.
    """

    case: str
    processes: int
    away_s: float
    requests: int
    failed: int
    wrong: int
    p50_before_ms: float
    p99_before_ms: float
    p50_away_ms: float
    p99_away_ms: float
    orders: Mapping[str, int]
    orders_max_ms: float
    order_message: str
    late_start_ms: float
    late_revision: int
    revision_away: int
    writable_ms: float | None
    agreed_ms: float | None
    after_lost: Mapping[str, str]
    failures: tuple[str, ...]


@dataclass
class Load:
    """Requests at a steady rate, and how long each took, by phase."""

    seen: CallerResults
    phase: str = "before"
    times_ms: dict[str, list[float]] = field(default_factory=dict)

    def of(self, phase: str, share: float) -> float:
        """A quantile of a phase's times."""
        times = sorted(self.times_ms.get(phase, [0.0]))
        return times[min(len(times) - 1, int(share * len(times)))]


@contextlib.asynccontextmanager
async def steady(
    client: aiohttp.ClientSession, urls: list[str], rate: float, load: Load
) -> AsyncIterator[None]:
    """Send ``rate`` requests/s to each gateway while the block runs; it ends when all are answered."""
    over = asyncio.Event()

    async def one(url: str, number: int) -> None:
        phase, began = load.phase, time.perf_counter()
        await ask(client, url, f"session-{number % SESSIONS}", load.seen)
        load.times_ms.setdefault(phase, []).append((time.perf_counter() - began) * 1e3)

    async def caller(url: str, place: int, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        due, number = loop.time() + place / rate / len(urls), place
        while not over.is_set():
            await asyncio.sleep(max(0.0, due - loop.time()))
            group.create_task(one(url, number))
            due, number = due + 1 / rate, number + len(urls)

    async with asyncio.TaskGroup() as group:
        for place, url in enumerate(urls):
            group.create_task(caller(url, place, group))
        try:
            yield
        finally:
            over.set()


async def order(client: aiohttp.ClientSession, url: str, share: float, mark: int) -> tuple[int, Any]:
    """Send one change of the routing; return the status and the answer."""
    body = {"config": config(share, mark), "comment": f"change {mark}"}
    timeout = aiohttp.ClientTimeout(total=ORDER_TIMEOUT_S)
    async with client.put(f"{url}/admin/routing", json=body, timeout=timeout) as response:
        return response.status, await response.json()


async def refused(client: aiohttp.ClientSession, urls: list[str], orders: Orders, until: float) -> None:
    """Try changes at one gateway after the other until ``until``; none may be accepted."""
    turn = 0
    while time.monotonic() < until:
        began = time.monotonic()
        status, answer = await order(client, urls[turn % len(urls)], 100.0, 900)
        orders.times_ms.append((time.monotonic() - began) * 1e3)
        error = answer.get("error", {})
        orders.answers[f"{status} {error.get('code', '')}".strip()] += 1
        orders.message = error.get("message", "")
        turn += 1
        await asyncio.sleep(0.1)


async def revision_of(client: aiohttp.ClientSession, url: str) -> int:
    """Return the revision in force at a gateway."""
    async with client.get(f"{url}/admin/routing") as response:
        number: int = (await response.json())["revision"]
        return number


async def back(client: aiohttp.ClientSession, urls: list[str]) -> tuple[float, float]:
    """Return the seconds until a change is accepted, and until it is in force everywhere."""
    began_wall, began = time.time(), time.monotonic()
    while time.monotonic() - began < BACK_TIMEOUT_S:
        status, answer = await order(client, urls[0], 50.0, 2)
        if status == 200:
            writable = time.monotonic() - began
            times = await asyncio.gather(*(in_force(client, url, answer["revision"]) for url in urls))
            return writable, max(times) - began_wall
        await asyncio.sleep(TRY_EVERY_S)
    raise RuntimeError(f"no change was taken within {BACK_TIMEOUT_S:g} s of the store's return: {answer}")


async def lost(client: aiohttp.ClientSession, url: str) -> dict[str, str]:
    """Return what a gateway reports about a store that came back empty, once it has read it."""
    end = time.monotonic() + BACK_TIMEOUT_S
    while True:
        async with client.get(f"{url}/metrics") as response:
            text = await response.text()
        found = [line for line in text.splitlines() if line.startswith("sluice_state_stream_in_step{")]
        [step] = [line.split()[-1] for line in found if 'stream="routing"' in line]
        if float(step) == 0 or time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    status, answer = await order(client, url, 100.0, 901)
    error = answer.get("error", {})
    return {"in_step": step, "a change": f"{status} {error.get('code', '')}: {error.get('message', '')}"}


async def measure(
    case: Case, urls: list[str], gone: StoreOutage, folder: Path, away_s: float, rate: float
) -> Result:
    """Run the benchmark once over gateways that are starting."""
    load, orders, after_lost = Load(CallerResults()), Orders(), {}
    headers = {"authorization": f"Bearer {KEY}"}
    writable: float | None = None
    agreed: float | None = None
    async with aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=30), connector=aiohttp.TCPConnector(limit=0)
    ) as client:
        await asyncio.gather(*(ready(client, url) for url in urls))
        _, made = await order(client, urls[0], SHARE, 1)
        await asyncio.gather(*(in_force(client, url, made["revision"]) for url in urls))
        # The gateways write their local copies once a second.
        await asyncio.sleep(STEADY_S)
        async with steady(client, urls, rate, load):
            await asyncio.sleep(STEADY_S)
            await asyncio.to_thread(gone.take)
            load.phase, began = "away", time.monotonic()
            with one_gateway(folder, len(urls)) as late:
                async with asyncio.TaskGroup() as group:
                    group.create_task(refused(client, urls, orders, began + away_s))
                    await ready(client, late)
                    late_start = time.monotonic() - began
                    late_revision = await revision_of(client, late)
                    await ask(client, late, "session-0", load.seen)
                standing = {await revision_of(client, url) for url in urls}
                await asyncio.to_thread(gone.give_back)
                load.phase = "back"
                if case is Case.REDIS_LOST:
                    after_lost = await lost(client, urls[0])
                    standing |= {await revision_of(client, url) for url in urls}
                else:
                    writable, agreed = await back(client, [*urls, late])
                await asyncio.sleep(STEADY_S)
    allowed = {1, 2} if writable is not None else {1}
    times = orders.times_ms or [0.0]
    return Result(
        case=case.value,
        processes=len(urls),
        away_s=away_s,
        requests=len(load.seen.answers) + len(load.seen.failures),
        failed=len(load.seen.failures),
        wrong=sum(mark not in allowed for _, _, mark in load.seen.answers),
        p50_before_ms=load.of("before", 0.5),
        p99_before_ms=load.of("before", 0.99),
        p50_away_ms=load.of("away", 0.5),
        p99_away_ms=load.of("away", 0.99),
        orders=dict(orders.answers),
        orders_max_ms=max(times),
        order_message=orders.message,
        late_start_ms=late_start * 1e3,
        late_revision=late_revision,
        revision_away=statistics.mode(standing) if len(standing) == 1 else -1,
        writable_ms=None if writable is None else writable * 1e3,
        agreed_ms=None if agreed is None else agreed * 1e3,
        after_lost=after_lost,
        failures=tuple(load.seen.failures[:3]),
    )


def run(case: Case, processes: int, away_s: float, rate: float) -> Result:
    """Run one case from start to end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with store(case, folder) as gone, fleet(folder, gone.url, processes) as urls:
            return asyncio.run(measure(case, urls, gone, folder, away_s, rate))


def good(result: Result) -> bool:
    """Return whether nothing failed, no change was accepted, and every answer used the last good revision."""
    served = not result.failed and not result.wrong and result.late_revision == result.revision_away == 2
    return served and set(result.orders) == {"503 backend_unavailable"}


def main(
    case: Annotated[list[Case] | None, typer.Option(help="Repeatable; default: all.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=32)] = 4,
    away: Annotated[float, typer.Option(min=1, max=60, help="Seconds.")] = 5.0,
    rate: Annotated[float, typer.Option(min=1, max=1_000, help="Requests a second at each gateway.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Exit with 1 when a request failed, a change was accepted, or an answer used another revision."""
    results = [run(one, processes, away, rate) for one in case or tuple(Case)]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        table = Table("figure", *(result.case for result in results), title=f"load {os.getloadavg()[0]:.1f}")
        columns = [asdict(result) for result in results]
        for name in columns[0]:
            cells = (column[name] for column in columns)
            table.add_row(name, *(f"{one:.1f}" if isinstance(one, float) else str(one) for one in cells))
        Console().print(table)
    if not all(map(good, results)):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
