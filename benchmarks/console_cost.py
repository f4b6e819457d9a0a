"""What open consoles cost: one gateway with ten live views open and without any, in turn.

python -m benchmarks.console_cost

First without requests, then with callers that ask again as soon as they have an answer. CPU is that of the
gateway process, all threads; the difference is between neighbouring rounds, with its 95 % interval, which is
wide on a busy machine. --parts instead measures the work itself: an aggregate, and its copy for a console.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import orjson
import typer
import uvloop
from rich.console import Console

from benchmarks.hot_path import KEY, START_S, Caller, Tally, bodies, cpu_s, gateway_of, running
from benchmarks.telemetry_parts import RECORD
from gateway.admin.console import FRESH_S, PAUSE_S

PATH = "/v1/chat/completions"
ROUTE = "self_hosted_generation"
ASK = f"GET /console/live HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()


@asynccontextmanager
async def open_console(port: int) -> AsyncIterator[None]:
    """Open a live view and read it while the block runs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK)
    first = await reader.readline()
    if b" 200 " not in first:
        raise RuntimeError(f"not answered: {first!r}")

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read())
        try:
            yield
        finally:
            reading.cancel()
            writer.close()


async def one_round(port: int, pid: int, tally: Tally, consoles: int, round_s: float) -> tuple[float, float]:
    """Return the CPU of one round in percent of a core, and the answers per second."""
    async with AsyncExitStack() as stack:
        for _ in range(consoles):
            await stack.enter_async_context(open_console(port))
        await asyncio.sleep(min(1.0, round_s))  # the cost of opening is not counted
        loop = asyncio.get_running_loop()
        answers, cpu, began = tally.answers, cpu_s(pid), loop.time()
        await asyncio.sleep(round_s)
        took_s = loop.time() - began
        return 100 * (cpu_s(pid) - cpu) / took_s, (tally.answers - answers) / took_s


async def measure(
    port: int, pid: int, callers: int, consoles: int, rounds: int, round_s: float
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Pairs of rounds: without and with consoles."""
    tally, loop = Tally(), asyncio.get_running_loop()
    for caller in range(callers):
        requests = bodies(PATH, stream=False, caller=caller)
        await loop.create_connection(partial(Caller, requests, tally), "127.0.0.1", port)
    async with asyncio.timeout(START_S):
        while callers and not tally.answers:  # noqa: ASYNC110 the answers are counted, not announced
            await asyncio.sleep(0.05)
    one = partial(one_round, port, pid, tally, round_s=round_s)
    pairs = []
    for number in range(rounds + 1):
        order = (0, consoles) if number % 2 else (consoles, 0)
        found = {count: await one(consoles=count) for count in order}
        if number:  # the first pair warms up
            pairs.append((found[0], found[consoles]))
    tally.over = True
    await asyncio.sleep(0.5)
    return pairs


def interval(values: list[float]) -> str:
    """Return the mean of the values, with its 95 % interval."""
    around = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.2f} ± {around:.2f}"


async def parts(consoles: int) -> None:
    """Print the CPU time of one aggregate and of a console's copy of it, by number of recent requests."""
    with tempfile.TemporaryDirectory() as folder:
        gateway = gateway_of(1, Path(folder))
        await gateway.core.base.state.open()
        await gateway.core.control.routing.start()
        console, record = gateway.services.console, msgspec.structs.replace(RECORD, route=ROUTE)
        for requests in (0, 200, 2_000, 10_000):
            for _ in range(requests):
                gateway.core.base.events.emit(record)
            costs = []
            for _ in range(20):
                await asyncio.sleep(1.05 * FRESH_S / 20)  # the aggregate has expired in some iterations
                began = time.thread_time()
                orjson.dumps(console.live())
                costs.append(1e3 * (time.thread_time() - began))
            whole, copy = max(costs), statistics.median(costs)
            share = (whole + consoles * copy) / (10 * PAUSE_S)
            print(f"{requests:>6} requests: {whole:.2f} ms, {copy:.3f} ms a console, {share:.2f} % of a core")
        await gateway.core.base.state.close()


def main(
    consoles: Annotated[int, typer.Option(min=1)] = 10,
    rounds: Annotated[int, typer.Option(min=2, help="Pairs of rounds of each case.")] = 10,
    round_s: Annotated[float, typer.Option(min=1.0, help="Seconds a round.")] = 6.0,
    core: Annotated[int, typer.Option(help="The gateway's core; the client takes the others.")] = 0,
    alone: Annotated[bool, typer.Option("--parts", help="The work itself, in this process.")] = False,
) -> None:
    """Print the figures of each case."""
    if alone:
        asyncio.run(parts(consoles))
        return
    others = os.sched_getaffinity(0) - {core}
    os.sched_setaffinity(0, others or {core})
    gc.disable()  # the collector of this client, which keeps nothing
    show = Console(width=120).print
    with running(1, core) as (port, pid):
        for callers in (0, 1, 16):
            pairs = uvloop.run(measure(port, pid, callers, consoles, rounds, round_s))
            shares = [[pair[side][0] for pair in pairs] for side in (0, 1)]
            show(f"{callers} callers: {statistics.mean(shares[0]):.2f} % of a core, with {consoles} consoles")
            show(f"  {interval([b - a for a, b in zip(*shares, strict=True)])} points of a core")
            if callers:
                costs = [
                    [1e4 * share / rate for share, rate in (pair[side] for pair in pairs)] for side in (0, 1)
                ]
                rates = statistics.mean(rate for pair in pairs for _, rate in pair)
                show(f"  {statistics.median(costs[0]):.0f} µs a request, {rates:.0f} requests a second")
                show(f"  {interval([b - a for a, b in zip(*costs, strict=True)])} µs a request with them")


if __name__ == "__main__":
    typer.run(main)
