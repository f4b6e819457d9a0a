"""What telemetry costs: ``python -m benchmarks.telemetry``.

Two gateways share a core, in front of a backend that answers at once. One has all telemetry on: traces to a
collector in a process of its own, metrics (scraped once per round), a JSON log line per request, the ledger
with its journal. The other has none. Rounds alternate between them, so that other load on the machine affects
both. Prints CPU per request, throughput and time to the first token, and each ratio: the limit is 0.95. With
``--engine embedded`` each has its own engine, as in production, and answers are streams of 64 tokens, 16 at
once. With ``--parts``, it prints the microseconds of each part instead.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, cast

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.hot_path import KEY, OUTPUT_TOKENS, Caller, Tally, bodies, cpu_s
from benchmarks.telemetry_engine import print_engine
from benchmarks.telemetry_house import collect, running, serve
from benchmarks.telemetry_parts import print_parts

BAR = 0.95
START_S = 90.0
# Streams per second in the rounds that measure the time to the first token: far from saturation.
STREAMS_PER_S = 100.0


class Engine(StrEnum):
    """What answers the requests."""

    NONE = "none"
    EMBEDDED = "embedded"


@dataclass
class Side:
    """One of the two gateways, and the figures of its rounds."""

    name: str
    port: int
    pid: int
    cpu_us: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)


class FirstByte(asyncio.Protocol):
    """One connection that streams answers one after the other and records when each began."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._began = 0.0
        self.waited_ms: list[float] = []
        self._seen = False
        self.idle = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self) -> None:
        """Send the next request."""
        self.idle, self._seen, self._began = False, False, time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Record the first piece of the body, and detect the last."""
        if not self._seen and b"data: " in data:
            self._seen = True
            self.waited_ms.append((time.perf_counter() - self._began) * 1000)
        self.idle = self.idle or data.endswith(b"0\r\n\r\n")


async def throughput(side: Side, path: str, in_flight: int, round_s: float) -> None:
    """Run one round of requests as fast as they are answered."""
    tally, loop = Tally(), asyncio.get_running_loop()
    connections = []
    for caller in range(in_flight):
        requests = bodies(path, stream=False, caller=caller)
        transport, _ = await loop.create_connection(partial(Caller, requests, tally), "127.0.0.1", side.port)
        connections.append(transport)
    await asyncio.sleep(0.2)
    answers, cpu, began = tally.answers, cpu_s(side.pid), time.perf_counter()
    await asyncio.sleep(round_s)
    answered, took_s = tally.answers - answers, time.perf_counter() - began
    tally.over = True
    # The telemetry of these requests is written within this time, and belongs to them.
    await asyncio.sleep(0.5)
    if answered:
        side.cpu_us.append((cpu_s(side.pid) - cpu) / (tally.answers - answers) * 1e6)
        side.per_second.append(answered / took_s)
    for transport in connections:
        transport.close()


async def first_tokens(sides: list[Side], path: str, seconds: float) -> None:
    """Run streams at a steady rate, on one side and the other in turn."""
    loop = asyncio.get_running_loop()
    callers: list[tuple[Side, list[FirstByte]]] = []
    for side in sides:
        made = []
        for caller in range(8):
            requests = bodies(path, stream=True, caller=caller)
            _, protocol = await loop.create_connection(partial(FirstByte, requests), "127.0.0.1", side.port)
            made.append(protocol)
        callers.append((side, made))
    for turn in range(int(seconds * STREAMS_PER_S)):
        _, made = callers[turn % len(callers)]
        free = next((one for one in made if one.idle), None)
        if free is not None:
            free.ask()
        await asyncio.sleep(1 / STREAMS_PER_S)
    await asyncio.sleep(0.5)
    for side, made in callers:
        for one in made:
            side.ttft_ms += one.waited_ms


async def measure(sides: list[Side], path: str, in_flight: int, rounds: int, round_s: float) -> None:
    """Run all rounds; the first of each side is not counted."""
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            await throughput(side, path, in_flight, round_s)
            await asyncio.to_thread(_scrape, side.port)
        if number == 0:
            for side in sides:
                side.cpu_us.clear()
                side.per_second.clear()
    await first_tokens(sides, path, rounds * round_s)


def _scrape(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def report(on: Side, off: Side) -> None:
    """Print the figures, and each ratio."""
    table = Table(title="everything told, beside nothing told")
    for heading in ("", on.name, off.name, "ratio, 1 is free", "bar"):
        table.add_column(heading, justify="left" if not heading else "right")

    def row(name: str, exported: float, silent: float, ratio: float, digits: int) -> None:
        met = "met" if ratio >= BAR else "missed"
        table.add_row(name, f"{exported:.{digits}f}", f"{silent:.{digits}f}", f"{ratio:.3f}", met)

    pairs = [b / a for a, b in zip(on.cpu_us, off.cpu_us, strict=False)]
    row("CPU µs a request", _mid(on.cpu_us), _mid(off.cpu_us), _mid(pairs), 0)
    row("  cheapest round", min(on.cpu_us), min(off.cpu_us), min(off.cpu_us) / min(on.cpu_us), 0)
    rates = [a / b for a, b in zip(on.per_second, off.per_second, strict=False)]
    row("requests/s", _mid(on.per_second), _mid(off.per_second), _mid(rates), 0)
    row("TTFT p50 ms", _mid(on.ttft_ms), _mid(off.ttft_ms), _mid(off.ttft_ms) / _mid(on.ttft_ms), 2)
    late = [_late(on.ttft_ms), _late(off.ttft_ms)]
    row("TTFT p99 ms", late[0], late[1], late[1] / late[0], 2)
    Console().print(table)


def _mid(values: list[float]) -> float:
    return statistics.median(values)


def _late(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def main(
    path: Annotated[str, typer.Option(help="/v1/chat/completions or /v1/generate.")] = "/v1/chat/completions",
    in_flight: Annotated[int, typer.Option(min=1, help="Connections.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each side.")] = 10,
    round_s: Annotated[float, typer.Option(min=0.1, help="Seconds a round.")] = 1.0,
    sample_ratio: Annotated[float, typer.Option(min=0, max=1, help="tracing.sample_ratio.")] = 1.0,
    pieces: Annotated[int, typer.Option(help="Pieces of an answer: 1 or 140.")] = 1,
    core: Annotated[int, typer.Option(help="The gateways' core; the rest takes the others.")] = 0,
    engine: Annotated[Engine, typer.Option(help="What answers: nothing but a stand-in, or the engine.")] = (
        Engine.NONE
    ),
    parts: Annotated[bool, typer.Option("--parts", help="Microseconds of each part instead.")] = False,
) -> None:
    """Compare a gateway with all telemetry to one without any."""
    if parts:
        print_parts()
        return
    if engine is Engine.EMBEDDED:
        print_engine(rounds, sample_ratio)
        return
    if OUTPUT_TOKENS % pieces:
        raise typer.BadParameter(f"{pieces} does not divide {OUTPUT_TOKENS}", param_hint="--pieces")
    others = os.sched_getaffinity(0) - {core} or {core}
    os.sched_setaffinity(0, others)
    gc.disable()
    with ExitStack() as stack:
        collector, _ = stack.enter_context(running(collect, others))
        endpoint = f"http://127.0.0.1:{collector}"
        sides = [
            Side("on", *stack.enter_context(running(serve, pieces, {core}, endpoint, sample_ratio))),
            Side("off", *stack.enter_context(running(serve, pieces, {core}, None, sample_ratio))),
        ]
        for side in sides:
            with socket.create_connection(("127.0.0.1", side.port), timeout=START_S):
                """The gateway listens."""
        uvloop.run(measure(sides, path, in_flight, rounds, round_s))
    report(*sides)


if __name__ == "__main__":
    typer.run(main)
