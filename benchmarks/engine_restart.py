"""What a dead or hung engine costs: ``python -m benchmarks.engine_restart --engine vllm --signal STOP``.

The engine runs under its supervisor as in the gateway, with streams in flight. Its process (for vLLM the
engine core) gets the signal. Reported are the times from then until the loss was noticed, the last stream had
failed, the next engine began to load, it took work, and it gave its first token. The waits between restarts
are left out. The first start, with cold imports, is reported too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from budgeting.counting import ChatTokenizer
from gateway.backends.port import Work
from gateway.backends.supervised import SupervisedHost
from gateway.config.settings import Settings, load_settings
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from gateway.wiring.engine import engine_maker
from resilience.failures import BackendFailure
from resilience.supervisor import EngineLost, EngineRestarted, EngineRestarting, Supervisor, SupervisorEvent

READY_TIMEOUT_S = 300.0
# Only limits the number of restarts: the supervisor must not give up during the benchmark.
MANY = 1000
FIGURES = ("noticed", "streams failed", "next begins to load", "takes work", "first token")


class Kind(StrEnum):
    """The engine that is measured."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


class Signal(StrEnum):
    """The signal that the engine's process gets."""

    KILL = "KILL"
    STOP = "STOP"


class EventTimes:
    """Records when each kind of supervisor event was last emitted."""

    def __init__(self) -> None:
        self.at: dict[type, float] = {}

    def emit(self, event: SupervisorEvent) -> None:
        """Record the time of the event."""
        self.at[type(event)] = time.perf_counter()


async def no_wait(seconds: float) -> None:
    """Skip the wait before a restart, which depends on the policy."""
    await asyncio.sleep(0)


async def ignore(delta: Delta) -> None:
    """Ignore the delta."""


def work(name: str, tokens: int) -> Work:
    """Return a request whose answer no end-of-text token ends."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, logit_bias={2: -100.0})
    return Work(name, tuple(range(300, 364)), (), sampling)


def victim(host: SupervisedHost, kind: Kind) -> psutil.Process:
    """Return the engine's process; for vLLM that of its engine core."""
    children = psutil.Process().children(recursive=True)
    word = "engine.process" if kind is Kind.EMBEDDED else "EngineCore"
    return next(each for each in children if word in " ".join([each.name(), *each.cmdline()]))


async def one_run(
    host: SupervisedHost, kind: Kind, sent: Signal, watch: EventTimes, streams: int
) -> list[float]:
    """Return the seconds from the signal to each of :data:`FIGURES`."""
    backend = host.backend("local")
    failed_at: list[float] = []
    running = asyncio.Event()

    async def note_delta(delta: Delta) -> None:
        running.set()

    async def stream(number: int) -> None:
        try:
            await backend.generate(work(f"stream-{number}-{time.perf_counter()}", 3000), note_delta)
        except BackendFailure:
            failed_at.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(stream(number))
        await running.wait()
        process = victim(host, kind)
        struck = time.perf_counter()
        os.kill(process.pid, getattr(signal, f"SIG{sent.value}"))
    if len(failed_at) != streams:
        raise RuntimeError(f"{streams - len(failed_at)} streams ended before the signal")
    if not await backend.wait_ready(READY_TIMEOUT_S):
        raise RuntimeError("the engine did not come back")
    first: list[float] = []

    async def saw_first(delta: Delta) -> None:
        first.append(time.perf_counter())

    await backend.generate(work(f"after-{struck}", 4), saw_first)
    moments = [
        watch.at[EngineLost],
        max(failed_at),
        watch.at[EngineRestarting],
        watch.at[EngineRestarted],
        first[0],
    ]
    return [moment - struck for moment in moments]


def held_now() -> str:
    """Return this process's memory, descriptors and threads as text."""
    this = psutil.Process()
    mib = this.memory_info().rss / 2**20
    return f"{mib:.0f} MiB, {this.num_fds()} descriptors, {this.num_threads()} threads"


async def measure(
    settings: Settings, kind: Kind, sent: Signal, runs: int, streams: int
) -> tuple[float, list[list[float]], list[str]]:
    """Return the seconds of the first start, each run's figures, and :func:`held_now` around each run."""
    watch = EventTimes()
    tokenizer = ChatTokenizer(Path(settings.engine.model))
    make = engine_maker(settings, settings.engine, tokenizer.token_bytes)
    if make is None:
        raise RuntimeError("engine.kind is none")
    host = SupervisedHost(
        make,
        supervisor=Supervisor(
            max_restarts_per_hour=MANY,
            hang_s=settings.engine.hang_seconds,
            stopped_s=settings.engine.stopped_seconds,
        ),
        start_timeout_s=settings.engine.start_timeout_seconds,
        on_step=lambda preemptions: None,
        emit=watch.emit,
        clock=time.monotonic,
        sleep=no_wait,
    )
    begun = time.perf_counter()
    await host.start()
    first_start_s = time.perf_counter() - begun
    try:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(host.keep())
            held = [held_now()]
            figures = []
            for _ in range(runs):
                figures.append(await one_run(host, kind, sent, watch, streams))
                held.append(held_now())
            keeper.cancel()
    finally:
        await host.stop(15.0)
    return first_start_s, figures, held


def main(
    engine: Annotated[Kind, typer.Option()] = Kind.EMBEDDED,
    sent: Annotated[Signal, typer.Option("--signal")] = Signal.KILL,
    runs: Annotated[int, typer.Option(min=1)] = 5,
    streams: Annotated[int, typer.Option(min=1)] = 4,
    model: Annotated[str, typer.Option()] = "models/demo",
) -> None:
    """Signal the engine ``--runs`` times and print the figures."""
    environ = {
        "SLUICE_ENGINE__KIND": engine.value,
        "SLUICE_ENGINE__MODEL": model,
        "SLUICE_ENGINE__BLOCK_SIZE": "32",
        "SLUICE_ENGINE__NUM_THREADS": "1",
        "SLUICE_ENGINE__KV_CACHE_BYTES": str(256 << 20),
        "SLUICE_ENGINE__MAX_NUM_SEQS": "16",
    }
    settings = load_settings(None, environ)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        first_start_s, figures, held = runner.run(measure(settings, engine, sent, runs, streams))
    console = Console()
    table = Table(
        title=f"{engine.value}, SIG{sent.value}, {streams} streams, {os.cpu_count()} cores; seconds"
    )
    table.add_column("from the signal until")
    for heading in ("median", "lowest", "highest"):
        table.add_column(heading, justify="right")
    for name, values in zip(FIGURES, zip(*figures, strict=True), strict=True):
        table.add_row(
            name, *(f"{value:.3f}" for value in (statistics.median(values), min(values), max(values)))
        )
    console.print(table)
    console.print(f"first start: {first_start_s:.2f} s")
    console.print(f"held at first: {held[0]}; after the first restart: {held[1]}; after the last: {held[-1]}")


if __name__ == "__main__":
    typer.run(main)
