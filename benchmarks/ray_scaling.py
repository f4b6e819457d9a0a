"""The gateway on Ray Serve, on this machine: ``python -m benchmarks.ray_scaling``.

Parts, each of which can be left out with ``--only``:

* ``answers``: the same requests to the plain gateway and to the application; are the answers the same?
* ``embedded``: throughput with one and more engine replicas that compute. It is limited by this machine's
  cores, which all replicas, the ingress, Serve's proxy and the callers share.
* ``paced``: the same with engines that compute nothing and keep a GPU's pace (``benchmarks.paced_engine``):
  it shows how the gateway and Serve scale.
* ``kill``: replicas killed under load, one after the other: which requests are lost?
* ``scale``: 1 → 4 → 1 under load, by the application's own policy, with long streams on the replicas that go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.paced_engine import STEP_S
from benchmarks.ray_cluster import (
    ROOT,
    Application,
    Callers,
    Tally,
    cluster,
    deploy,
    until,
    wait_ready,
    write_config,
)
from observability.metrics_text import total_of

PARTS = ("answers", "embedded", "paced", "kill", "scale")
WARM_ANSWERS = 4
WAIT_S = 120.0
# Batch size of the paced engine: small enough that this machine's cores can carry eight such engines.
PACED_SEQUENCES = 4
PROMPTS = tuple(
    f"{words} {tail}"
    for words in ("Something like Vinland Saga?", "How long is shipping?", "Is volume 3 in stock?")
    for tail in ("Please.", "And why?", "In one line.", "Say more.")
)


@dataclass(frozen=True)
class Throughput:
    """The throughput of a number of replicas."""

    replicas: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    faults: int


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def plain_gateway(folder: Path) -> Iterator[str]:
    """Run `sluice serve` with the configuration of the application; yield its address."""
    folder.mkdir()
    port = free_port()
    config = write_config(folder, server={"port": port})
    command = [sys.executable, "-m", "ops.cli", "serve", "--config", str(config)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def said(url: str) -> list[str]:
    """Return a gateway's answers to every prompt, by both contracts."""
    texts = []
    with httpx.Client(timeout=60) as client:
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            native = {"messages": messages, "sampling": {"temperature": 0, "max_tokens": 48}}
            texts.append(client.post(f"{url}/v1/generate", json=native).json()["output_text"])
            seeded = {"model": "demo", "messages": messages, "max_tokens": 48, "seed": 7, "temperature": 0.8}
            chat = client.post(f"{url}/v1/chat/completions", json=seeded).json()
            texts.append(chat["choices"][0]["message"]["content"])
    return texts


def found(url: str) -> int:
    """Return how many prompts that were sent before find a part of themselves in a cache."""
    hits = 0
    with httpx.Client(timeout=60) as client:
        for prompt in PROMPTS:
            body = {"messages": [{"role": "user", "content": prompt}], "sampling": {"max_tokens": 1}}
            usage = client.post(f"{url}/v1/generate", json=body).json()["usage"]
            # The system prompt is in every replica's cache; one more cached block is the prompt's own.
            hits += usage["cached_tokens"] > usage["input_tokens"] - 2 * 16
    return hits


def metric(url: str, name: str) -> float:
    """A metric's sum over its labels."""
    return total_of(httpx.get(f"{url}/metrics").text, name)


async def throughput(
    app: Application, replicas: int, callers: int, tokens: int, seconds: float
) -> Throughput:
    """Run ``callers`` for ``seconds``; answers begun before count by the share of their time."""
    await app.wait_for("Engine", replicas, WAIT_S)
    calling = Callers(app.url, count=callers, tokens=tokens, prompts=64)
    async with calling.calling() as tally:
        await until(lambda: tally.whole >= callers, WAIT_S)
        before, began = tally.tokens, time.perf_counter()
        first = len(tally.ttft_s)
        await asyncio.sleep(seconds)
        rate = (tally.tokens - before) / (time.perf_counter() - began)
        ttft_ms = sorted(1000 * value for value in tally.ttft_s[first:])
    return Throughput(
        replicas,
        rate,
        statistics.median(ttft_ms),
        ttft_ms[int(0.95 * (len(ttft_ms) - 1))],
        len(tally.faults),
    )


def table(title: str, rows: list[Throughput], console: Console) -> None:
    """Print the rows, with the efficiency relative to the first one."""
    shown = Table(title=title, title_justify="left")
    for column in ("replicas", "tokens/s", "efficiency", "TTFT p50 ms", "p95 ms", "not whole"):
        shown.add_column(column, justify="right")
    for row in rows:
        ideal = rows[0].tokens_per_s * row.replicas / rows[0].replicas
        shown.add_row(
            str(row.replicas),
            f"{row.tokens_per_s:.0f}",
            f"{row.tokens_per_s / ideal:.2f}",
            f"{row.ttft_p50_ms:.0f}",
            f"{row.ttft_p95_ms:.0f}",
            str(row.faults),
        )
    console.print(shown)


def fixed(folder: Path, replicas: int, sequences: int) -> Path:
    """Write a configuration with a fixed number of engine replicas."""
    return write_config(
        folder,
        engine={"max_num_seqs": sequences},
        admission={"max_wait_ms": 60_000.0},
        ray={
            "engines_min": replicas,
            "engines_max": replicas,
            "drain_seconds": 30.0,
            "idle_timeout_seconds": 5.0,
        },
    )


def scaling(url: str, folder: Path, counts: list[int], seconds: float, *, paced: bool) -> list[Throughput]:
    """Measure the throughput for each number of replicas."""
    rows = []
    sequences = PACED_SEQUENCES if paced else 16
    for count in counts:
        app = deploy(url, fixed(folder, count, sequences), paced=paced)
        # With a computing engine, more callers than fit would only queue; the paced engine's batch is filled.
        callers = sequences * count if paced else 8 * count
        rows.append(asyncio.run(throughput(app, count, callers, 48 if paced else 24, seconds)))
    return rows


async def kills(app: Application, count: int, console: Console) -> None:
    """Kill replicas under load."""
    before = metric(app.url, "sluice_resumed_streams_total")
    calling = Callers(app.url, count=8, tokens=60)
    async with calling.calling() as tally:
        await until(lambda: tally.whole >= WARM_ANSWERS, WAIT_S)
        for _ in range(count):
            whole = tally.whole
            app.signal_replicas("Engine")
            await until(partial(_more, tally, whole + 8), WAIT_S)
            await asyncio.sleep(1.0)
            await app.wait_for("Engine", 2, WAIT_S)
    resumed = metric(app.url, "sluice_resumed_streams_total") - before
    console.print(
        f"kill: {count} replicas of 2 killed, 8 callers: {tally.whole} answers whole and as before, "
        f"{len(tally.faults)} lost, {resumed:.0f} streams resumed on another replica"
    )
    for fault in tally.faults[:5]:
        console.print(f"  {fault}")


def _more(tally: Tally, whole: int) -> bool:
    return tally.whole >= whole


async def signal_under_load(app: Application, sent: signal.Signals, count: int, console: Console) -> None:
    """Send a signal to several replicas at the same time, with long streams on all of them."""
    before = metric(app.url, "sluice_resumed_streams_total")
    calling = Callers(app.url, count=8, tokens=100)
    async with calling.calling() as tally:
        await until(partial(_more, tally, WARM_ANSWERS), WAIT_S)
        await asyncio.sleep(1.0)
        app.signal_replicas("Engine", sent, count)
    resumed = metric(app.url, "sluice_resumed_streams_total") - before
    console.print(
        f"{sent.name}: {count} of 2 replicas at once under 8 streams, no request behind them: "
        f"{tally.whole} whole and as before, {len(tally.faults)} lost, {resumed:.0f} resumed"
    )
    for fault in tally.faults[:5]:
        console.print(f"  {fault}")
    await app.wait_for("Engine", 2, WAIT_S)


async def one_four_one(app: Application, console: Console) -> None:
    """Scale up by load, then down with streams on every replica."""
    before = metric(app.url, "sluice_resumed_streams_total")
    up = Callers(app.url, count=20, tokens=40)
    began = time.perf_counter()
    async with up.calling() as rising:
        await app.wait_for("Engine", 4, WAIT_S)
        up_s = time.perf_counter() - began
    down = Callers(app.url, count=8, tokens=400)
    async with down.calling() as falling:
        await until(lambda: app.states("Engine").get("RUNNING", 0) <= 2, WAIT_S)
    await app.wait_for("Engine", 1, WAIT_S)
    resumed = metric(app.url, "sluice_resumed_streams_total") - before
    console.print(
        f"scale: 1 → 4 in {up_s:.0f} s under 20 callers: {rising.whole} whole, {len(rising.faults)} failed; "
        f"4 → 1 under 8 streams of 400 tokens: {falling.whole} whole, {len(falling.faults)} broken, "
        f"{resumed:.0f} resumed"
    )
    for fault in (*rising.faults, *falling.faults)[:5]:
        console.print(f"  {fault}")


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; default: all.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of each measurement.")] = 12.0,
    embedded: Annotated[str, typer.Option(help="Counts of computing replicas.")] = "1,2",
    paced: Annotated[str, typer.Option(help="Counts of paced replicas.")] = "1,2,4,8",
    kill_count: Annotated[int, typer.Option("--kills", min=1)] = 3,
) -> None:
    """Run the parts and print the figures."""
    parts, console = set(only or PARTS), Console(width=110)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name, cluster(free_port()) as url:
        folder = Path(name)
        if "answers" in parts:
            app = deploy(url, fixed(folder, 2, 16), paced=False)
            with plain_gateway(folder / "plain") as plain:
                ours, theirs = said(app.url), said(plain)
            same = sum(one == other for one, other in zip(ours, theirs, strict=True))
            console.print(
                f"answers: {same} of {len(theirs)} say the same as the plain gateway; "
                f"{found(app.url)} of {len(PROMPTS)} repeated prompts meet the replica that has them cached"
            )
        if "kill" in parts:
            app = deploy(url, fixed(folder, 2, 16), paced=True)
            asyncio.run(kills(app, kill_count, console))
            asyncio.run(signal_under_load(app, signal.SIGKILL, 2, console))
            asyncio.run(signal_under_load(app, signal.SIGSTOP, 1, console))
        if "embedded" in parts:
            counts = [int(part) for part in embedded.split(",")]
            rows = scaling(url, folder, counts, seconds, paced=False)
            table("engines that compute, 1 thread each; all on this machine's cores", rows, console)
        if "paced" in parts:
            counts = [int(part) for part in paced.split(",")]
            rows = scaling(url, folder, counts, seconds, paced=True)
            title = (
                f"paced engines: {1000 * STEP_S:.0f} ms a step, batch of {PACED_SEQUENCES}; nothing computed"
            )
            table(title, rows, console)
        if "scale" in parts:
            config = write_config(
                folder,
                engine={"max_num_seqs": 8},
                admission={"max_wait_ms": 60_000.0},
                ray={
                    "engines_min": 1,
                    "engines_max": 4,
                    "engine_target_sequences": 4.0,
                    "scale_up_seconds": 0.5,
                    "scale_down_seconds": 3.0,
                    "metrics_seconds": 0.5,
                },
            )
            app = deploy(url, config, paced=True)
            asyncio.run(one_four_one(app, console))


if __name__ == "__main__":
    typer.run(main)
