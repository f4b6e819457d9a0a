"""``python -m benchmarks.request_cost``: see the package."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.embeddings import load as vectors_load
from benchmarks.embeddings.worker import MODEL as VECTOR_MODEL
from benchmarks.forwarding.client import Answer, Connection
from benchmarks.forwarding.gateways import KEY, REPOSITORY, Name, Recipe, python_module, recipe
from benchmarks.forwarding.processes import ask, free_port, started, wait_until_ready
from benchmarks.forwarding.workload import MODEL, Regime, bodies

WARM_UP = 300
WRITE_TIMEOUT_S = 60.0
STEP_MS = 10
# Libraries of the ledger's database, which is written once per batch.
OF_BATCHES = ("sqlalchemy", "aiosqlite")
BUDGET = Path(__file__).parent / "budget.json"
DIMENSIONS = 1_024


class Kind(StrEnum):
    """Kinds of requests, each with a budget: whole answers, streams of 140 chunks, vectors of one text."""

    CHATS = auto()
    STREAMS = auto()
    VECTORS = auto()


# The budget counts one request at a time: concurrent work makes the counts depend on the machine's speed.
BUDGET_REQUESTS = {Kind.CHATS: 50, Kind.STREAMS: 6, Kind.VECTORS: 50}


@dataclass(frozen=True, slots=True)
class Cost:
    """One gateway's counts of one kind of request, each divided by the number of requests."""

    calls: dict[tuple[str, str], float]
    asked: dict[str, float]
    survivors: float
    collections: tuple[tuple[int, float, int], ...] = ()

    @property
    def python_calls(self) -> float:
        """Return the number of calls of Python functions."""
        return sum(self.calls.values())

    @property
    def steady_calls(self) -> dict[str, int]:
        """Return by package the calls that every request makes, rounded down.

        Work that is done once per batch, second or wait makes a fraction of a call per request, which depends
        on the machine's speed, so it is not counted.
        """
        rooms: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            if not any(library in Path(file).parts for library in OF_BATCHES):
                rooms[room_of(file)] += math.floor(count + 0.1)
        return dict(sorted((+rooms).items()))

    def by_room(self) -> dict[str, float]:
        """Return the Python calls by package of the product, or by library."""
        rooms: dict[str, float] = defaultdict(float)
        for (file, _), count in self.calls.items():
            rooms[room_of(file)] += count
        return dict(sorted(rooms.items(), key=lambda room: -room[1]))


def room_of(file: str) -> str:
    """``gateway/http`` for a file of the product, a package's name for a library."""
    path = Path(file)
    if path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts:
        parts = path.relative_to(REPOSITORY).parts
        if parts[0] != ".venv":
            return "/".join(parts[: 2 if len(parts) > 2 else 1]) if len(parts) > 1 else parts[0]
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1].removesuffix(".py")
    return f"python: {path.stem}"


async def send(
    port: int, *, stream: bool, requests: int, in_flight: int, seed: str, rate: float = math.inf
) -> None:
    """Send that many requests, ``in_flight`` at a time and ``rate`` a second, and check every answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = loop.create_future()
    left, ended = requests, 0
    texts = bodies(Regime.CONVERSATION, stream=stream, seed=seed)
    tickets: dict[Connection, str] = {}

    def next_one(connection: Connection) -> None:
        nonlocal left
        if left:
            left -= 1
            body, tickets[connection] = next(texts)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            connection.send(head.encode() + body, stream=stream)

    def one_ended(connection: Connection, answer: Answer) -> None:
        nonlocal ended
        if done.done():
            return
        if answer.fault is not None or not (answer.text or "").startswith(tickets[connection]):
            done.set_exception(RuntimeError(f"a wrong answer: {answer.fault or answer.text!r}"))
            return
        ended += 1
        if ended == requests:
            done.set_result(None)
        else:
            loop.call_at(began + (requests - left) / rate, next_one, connection)

    connections = []
    for _ in range(in_flight):
        _, connection = await loop.create_connection(
            lambda: Connection(one_ended, lambda marks: None), "127.0.0.1", port
        )
        connections.append(connection)
        next_one(connection)
    await done
    for connection in connections:
        connection.close()


async def send_vectors(port: int, *, requests: int, in_flight: int) -> None:
    """Send that many requests for the vector of one text, ``in_flight`` at a time, and check every answer."""
    job = vectors_load.VectorJob(port, VECTOR_MODEL, KEY, in_flight, texts=1, seconds=0.0, warm_up_s=0.0)
    numbers = iter(range(requests))

    async def caller() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            fault = await vectors_load.ask(reader, writer, job, number)
            if fault is not None:
                raise RuntimeError(f"a wrong answer: {fault}")
        writer.close()

    async with asyncio.TaskGroup() as callers:
        for _ in range(in_flight):
            callers.create_task(caller())


def counted(
    name: Name,
    kind: Kind,
    *,
    requests: int,
    in_flight: int,
    folder: Path,
    collections_at: float | None = None,
) -> Cost:
    """Start gateway and fake worker, warm up and count; with ``collections_at`` only garbage collections."""
    worker_port, port, out = free_port(), free_port(), folder / "counts.json"
    vectors, stream = kind is Kind.VECTORS, kind is Kind.STREAMS
    plain: Recipe = recipe(
        name, folder=folder, port=port, worker_port=worker_port, model=VECTOR_MODEL if vectors else MODEL
    )
    made = replace(plain, command=python_module("benchmarks.request_cost.counted", out, *plain.command[2:]))
    environment = dict(made.environment)
    if collections_at is not None:
        environment["SLUICE_COUNT"] = "collections"
    logs = folder / "worker.log", folder / "gateway.log"
    fake_worker = python_module("benchmarks.forwarding.worker", worker_port)
    if vectors:
        fake_worker = python_module("benchmarks.embeddings.worker", worker_port, 0, DIMENSIONS)

    def load(count: int, seed: str, rate: float = math.inf) -> None:
        if vectors:
            uvloop.run(send_vectors(port, requests=count, in_flight=in_flight))
        else:
            uvloop.run(send(port, stream=stream, requests=count, in_flight=in_flight, seed=seed, rate=rate))

    with (
        started(fake_worker, logs[0]) as worker,
        started(made.command, logs[1], environment) as gateway,
    ):
        wait_until_ready(worker, worker_port, "/health", logs[0])
        wait_until_ready(gateway, port, "/ready", logs[1])
        # Streams without a pause, so that the caches are full within a second.
        load(min(WARM_UP, 3 * requests), "warm up")
        if stream:
            ask(worker_port, "POST", "/control", {"step_ms": STEP_MS})
        idle = _window(gateway.pid, out, lambda: time.sleep(2.0))
        began = time.monotonic()
        busy = _window(gateway.pid, out, lambda: load(requests, "counted", collections_at or math.inf))
        share = (time.monotonic() - began) / 2.0
    return _difference(busy, idle, share, requests)


def _window(pid: int, out: Path, between: Any) -> dict[str, Any]:
    out.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    between()
    time.sleep(0.3)
    os.kill(pid, signal.SIGUSR2)
    give_up_at = time.monotonic() + WRITE_TIMEOUT_S
    while not out.exists():
        if time.monotonic() > give_up_at:
            raise RuntimeError("the gateway wrote no counts")
        time.sleep(0.05)
    return dict(json.loads(out.read_text()))


def _difference(busy: dict[str, Any], idle: dict[str, Any], share: float, requests: int) -> Cost:
    """Return the counts per request, minus those of an idle gateway in the same time."""
    calls: dict[tuple[str, str], float] = defaultdict(float)
    for file, name, count in busy["calls"]:
        calls[file, name] += count
    for file, name, count in idle["calls"]:
        calls[file, name] -= count * share
    at_rest = idle["asked"]
    asked = {what: count - at_rest.get(what, 0) * share for what, count in busy["asked"].items()}
    return Cost(
        {key: count / requests for key, count in calls.items() if count > 0.005 * requests},
        {kind: max(0.0, round(count / requests, 3)) for kind, count in asked.items()},
        (busy["survivors"] - idle["survivors"]) / requests,
        tuple(busy["collections"]),
    )


def budget_of(kind: Kind) -> dict[str, dict[str, float]]:
    """Return the current cost of a request of that kind, in the form of the committed budget."""
    with tempfile.TemporaryDirectory() as folder:
        cost = counted(
            Name.SLUICE,
            kind,
            requests=BUDGET_REQUESTS[kind],
            in_flight=1,
            folder=Path(folder),
        )
    # While a stream is paced for seconds, the timers of the gateway itself outnumber the stream's.
    return {"calls": dict(cost.steady_calls), "asked": {} if kind is Kind.STREAMS else cost.asked}


def print_collections(cost: Cost, requests: int) -> None:
    """Print the garbage collections by generation: how many, how long, and how many objects they found."""
    print(f"{requests} requests, {cost.survivors:.1f} surviving objects a request")
    for generation in range(3):
        of_it = [(took_s, found) for kind, took_s, found in cost.collections if kind == generation]
        if of_it:
            pauses = sorted(took_s * 1000 for took_s, _ in of_it)
            print(
                f"generation {generation}: {len(of_it)} collections, "
                f"{sum(found for _, found in of_it)} objects found, "
                f"ms: median {pauses[len(pauses) // 2]:.2f}, "
                f"p99 {pauses[math.ceil(len(pauses) * 0.99) - 1]:.2f}, max {pauses[-1]:.2f}"
            )


def main(
    gateway: Annotated[Name, typer.Option(help="sluice or fastapi.")] = Name.SLUICE,
    kind: Annotated[Kind, typer.Option(help="Whole answers, streams or vectors.")] = Kind.CHATS,
    requests: Annotated[int, typer.Option(min=10)] = 1000,
    in_flight: Annotated[int, typer.Option(min=1)] = 1,
    top: Annotated[int, typer.Option(help="Functions to print.")] = 0,
    collections: Annotated[
        float | None, typer.Option(help="Show only collections of garbage, at this many requests a second.")
    ] = None,
    write: Annotated[bool, typer.Option(help="Write the budgets of all kinds.")] = False,
) -> None:
    """Count what a request costs."""
    if write:
        budgets = {one: budget_of(one) for one in Kind}
        BUDGET.write_text(json.dumps(budgets, indent=2) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        cost = counted(
            gateway,
            kind,
            requests=requests,
            in_flight=in_flight,
            folder=Path(folder),
            collections_at=collections,
        )
    if collections is not None:
        print_collections(cost, requests)
        return
    console = Console(width=150)
    table = Table(title=f"{gateway}, {kind}, {in_flight} in flight")
    table.add_column("room")
    table.add_column("Python calls a request", justify="right")
    for room, count in cost.by_room().items():
        table.add_row(room, f"{count:.1f}")
    table.add_row("all", f"{cost.python_calls:.1f}")
    console.print(table)
    print(
        {kind: round(count, 2) for kind, count in cost.asked.items()}, "survivors", round(cost.survivors, 2)
    )
    for (file, name), count in sorted(cost.calls.items(), key=lambda one: -one[1])[:top]:
        print(f"{count:9.2f}  {room_of(file)}/{Path(file).name}:{name}")


if __name__ == "__main__":
    typer.run(main)
