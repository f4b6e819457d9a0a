"""How soon every process has a new record, and what watching costs while there are none.

    python -m benchmarks.state_propagation --url sqlite:////tmp/state.db
    python -m benchmarks.state_propagation --processes 8 --appends 50 --url redis://127.0.0.1:6379/9

Each of the processes follows one stream with a local copy, as a gateway does. The parent appends at random
times; a record's time in a process is from the call that appends it to the call that applies it there, by the
machine's monotonic clock. Then no records are appended, and the CPU time of each process is read. The stream
``bench.propagation`` at the URL grows with every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from gateway.state.local_copy import LocalCopy
from gateway.state.port import Record, StateStore
from gateway.state.stream_follower import StreamFollower
from gateway.state.url import parse_state_url
from gateway.wiring.state_store import make_state_store

STREAM = "bench.propagation"
NAMESPACE = "bench"
START_TIMEOUT_S = 120.0
LAST_TIMEOUT_S = 30.0
# Appends come 20 to 200 ms apart, so at any phase of the watchers.
GAP_S = (0.02, 0.2)


@dataclass(frozen=True, slots=True)
class Result:
    """Times in ms; ``idle_cpu_percent`` is the mean of the processes, in percent of one core."""

    store: str
    processes: int
    appends: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    last_process_p50_ms: float
    append_p50_ms: float
    idle_cpu_percent: float


def _store(url: str) -> StateStore:
    return make_state_store(parse_state_url(url), namespace=NAMESPACE, unix_time=time.time)


async def follow(url: str, folder: Path) -> None:
    """Run one process: print ``ready``, then for each record its number and when it was applied."""

    def apply(record: Record) -> None:
        print(json.dumps([record.number, time.monotonic()]), flush=True)

    store = _store(url)
    follower = StreamFollower(store, STREAM, apply, copy=LocalCopy(folder, STREAM), clock=time.monotonic)
    await store.open()
    await follower.start()
    print("ready", flush=True)
    async with asyncio.TaskGroup() as loops:
        loops.create_task(store.run())
        loops.create_task(follower.run())


async def _append(url: str, appends: int, seed: int) -> tuple[dict[int, float], list[float]]:
    """Append the records; return when each append was called, and how long each call took."""
    store, rng = _store(url), random.Random(seed)
    await store.open()
    called: dict[int, float] = {}
    took: list[float] = []
    for number in range(appends):
        await asyncio.sleep(rng.uniform(*GAP_S))
        begun = time.monotonic()
        record = await store.append(STREAM, json.dumps({"n": number}).encode(), author="benchmark")
        called[record.number] = begun
        took.append(time.monotonic() - begun)
    await store.close()
    return called, took


def _idle_cpu_percent(children: list[subprocess.Popen[str]], seconds: float) -> float:
    def spent() -> list[float]:
        times = [psutil.Process(child.pid).cpu_times() for child in children]
        return [one.user + one.system for one in times]

    before = spent()
    time.sleep(seconds)
    return statistics.mean(b - a for a, b in zip(before, spent(), strict=True)) / seconds * 100


def measure(url: str, processes: int, appends: int, idle_s: float, seed: int = 0) -> Result:
    """Run the benchmark once."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        asyncio.run(_opened(url))
        outputs = [Path(folder) / f"{number}.out" for number in range(processes)]
        children: list[subprocess.Popen[str]] = []
        for number, output in enumerate(outputs):
            words = [sys.executable, "-m", "benchmarks.state_propagation", "--url", url]
            out = stack.enter_context(output.open("w"))
            copies = ["--follow", str(Path(folder) / f"copies-{number}")]
            child = subprocess.Popen([*words, *copies], stdout=out, text=True)
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        _until(lambda: all("ready" in output.read_text() for output in outputs), START_TIMEOUT_S)
        called, took = asyncio.run(_append(url, appends, seed))
        last = f"[{max(called)},"
        _until(lambda: all(last in output.read_text() for output in outputs), LAST_TIMEOUT_S)
        seen = [_read(output, called) for output in outputs]
        idle = _idle_cpu_percent(children, idle_s)
    times = sorted(one for process in seen for one in process.values())
    slowest = [max(process[number] for process in seen) for number in called]
    return Result(
        store=parse_state_url(url).kind,
        processes=processes,
        appends=appends,
        p50_ms=statistics.median(times) * 1e3,
        p99_ms=times[min(len(times) - 1, int(len(times) * 0.99))] * 1e3,
        max_ms=times[-1] * 1e3,
        last_process_p50_ms=statistics.median(slowest) * 1e3,
        append_p50_ms=statistics.median(took) * 1e3,
        idle_cpu_percent=idle,
    )


async def _opened(url: str) -> None:
    store = _store(url)
    await store.open()
    if not store.healthy:
        raise typer.BadParameter(f"{parse_state_url(url).shown} cannot be reached")
    await store.close()


def _until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.05)


def _read(output: Path, called: dict[int, float]) -> dict[int, float]:
    lines = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("[")]
    return {number: at - called[number] for number, at in lines if number in called}


def main(
    url: Annotated[str, typer.Option(help="A state store: sqlite:////FILE or redis://…")],
    processes: Annotated[int, typer.Option(min=1, max=64)] = 8,
    appends: Annotated[int, typer.Option(min=1, max=10_000)] = 50,
    idle_s: Annotated[float, typer.Option(min=0.5, max=600)] = 10.0,
    follow_in: Annotated[Path | None, typer.Option("--follow", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and print."""
    if follow_in is not None:
        asyncio.run(follow(url, follow_in))
        return
    result = measure(url, processes, appends, idle_s)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    table = Table("figure", "value")
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
