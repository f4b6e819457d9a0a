"""What a request costs the gateway itself: ``python -m benchmarks.hot_path``.

The whole server (uvicorn, HTTP edge, journey, telemetry, ledger on SQLite) runs in a process on one core in
front of a backend that answers at once; a raw keep-alive client runs on another core. Prompts are about 8 KB
(1,800 tokens), of which only the last turn is new. Prints CPU microseconds per request, over all threads of
the server, for JSON and for streams, and the cost of each further streamed chunk.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import random
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Final, cast

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from admission.values import BackendLoad
from benchmarks.stages import WORDS
from gateway import server
from gateway.backends.port import Backend, BackendState, Completion, Continue, DeltaSink, Fleet, Work
from gateway.config.settings import load_settings
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.values import FinishReason, Usage
from gateway.journey import Journey
from gateway.wiring.backends import Engines
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from observability.logs import configure_logging

KEY: Final = "sk-benchmark-0123456789abcdef0123456789abcdef"
MODEL: Final = "null"
OUTPUT_TOKENS: Final = 140
# English text of about 8 KB in 12 turns; the demo tokenizer makes about 1,800 tokens of it.
TURNS: Final = 12
CONVERSATIONS: Final = 4
WORDS_PER_TURN: Final = 105
START_S: Final = 60.0
END_OF_CHUNKS: Final = b"0\r\n\r\n"


class NullBackend:
    """A backend that answers at once: 140 tokens in ``pieces`` deltas, one loop iteration before each."""

    name = "local"
    kind = "embedded"
    model = MODEL
    features = frozenset(Feature)
    continues: frozenset[Continue] = frozenset({Continue.TOKENS})
    state = BackendState.READY
    load: BackendLoad | None = None

    def __init__(self, pieces: int) -> None:
        self._pieces = [" word" * (OUTPUT_TOKENS // pieces)] * pieces
        self._tokens = OUTPUT_TOKENS // pieces

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Emit the pieces."""
        for piece in self._pieces:
            await asyncio.sleep(0)
            await out(Delta(piece, self._tokens, 0, 0.0))
        return Completion(FinishReason.STOP, Usage(len(work.token_ids), OUTPUT_TOKENS))


def gateway_of(pieces: int, folder: Path) -> Gateway:
    """Build the gateway as configured by ``sluice.yaml``, with a backend that answers at once."""
    settings = load_settings(
        Path("sluice.yaml"),
        {
            "SLUICE_STATE__URL": f"sqlite:///{folder}/s.db",
            "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/l.db",
        },
    )
    whole = build(settings, admin_key=KEY)
    journey = whole.services.journey
    assert isinstance(journey, Journey)
    backends: dict[str, Backend] = {"local": NullBackend(pieces)}
    fleet = Fleet(backends)
    return replace(
        whole,
        core=replace(
            whole.core,
            backends=replace(whole.core.backends, engines=Engines((), {}, {}, {}), fleet=fleet),
        ),
        services=replace(whole.services, journey=replace(journey, fleet=fleet)),
    )


def serve(pieces: int, core: int, profile: str | None, port: Connection) -> None:
    """Run the server's process; it ends on SIGTERM."""
    os.sched_setaffinity(0, {core})
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        logs = configure_logging("info", json=True, stream=nowhere)
        gateway = gateway_of(pieces, Path(folder))
        listener = server.listen("127.0.0.1", 0)
        port.send(listener.getsockname()[1])
        if profile is None:
            server.run(gateway, listener)
        else:
            profiler = cProfile.Profile()
            profiler.runcall(server.run, gateway, listener)
            profiler.dump_stats(profile)
        logs.close()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads, with the scheduler's own precision."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def bodies(path: str, *, stream: bool, caller: int) -> Iterator[bytes]:
    """Whole HTTP requests without end: one of a few conversations, whose last turn is new each time."""
    rng = random.Random(caller % CONVERSATIONS)
    system = {"role": "system", "content": "You answer questions about a manga shop. " + _words(rng)}
    turns = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": _words(rng)}
        for number in range(TURNS)
    ]
    native = path == "/v1/generate"
    extra = {"sampling": {"max_tokens": 256}} if native else {"model": MODEL, "max_tokens": 256}
    number = 0
    while True:
        number += 1
        last = {"role": "user", "content": f"And what else is like it, number {caller}-{number}?"}
        body = json.dumps({"messages": [system, *turns, last], "stream": stream, **extra}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {KEY}\r\naccept: */*\r\nuser-agent: benchmark\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        yield head.encode() + body


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=WORDS_PER_TURN))


class Caller(asyncio.Protocol):
    """A keep-alive connection that sends the next request as soon as an answer is complete."""

    def __init__(self, requests: Iterator[bytes], tally: Tally) -> None:
        self._requests = requests
        self._tally = tally
        self._wanted = -1
        self._got = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Look for the end of the answer, and send the next request."""
        got = self._got
        got += data
        if self._wanted < 0:
            end = got.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(got[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(f"not answered: {bytes(got[:600])!r}")
            _, _, length = head.partition(b"content-length: ")
            self._wanted = end + 4 + int(length.partition(b"\r\n")[0]) if length else 0
        whole = len(got) >= self._wanted if self._wanted else got.endswith(END_OF_CHUNKS)
        if whole:
            self._tally.answers += 1
            got.clear()
            self._wanted = -1
            if not self._tally.over:
                self._transport.write(next(self._requests))


@dataclass(slots=True)
class Tally:
    """The number of answers so far, and whether to stop."""

    answers: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement: medians of the rounds, and the cheapest round, which other load disturbs least."""

    cpu_us: float
    lowest_us: float
    per_second: float


async def load(
    port: int, pid: int, path: str, *, stream: bool, in_flight: int, rounds: int, round_s: float
) -> Figure:
    """Return medians over the rounds; one more round comes first and is not counted."""
    tally = Tally()
    loop = asyncio.get_running_loop()
    for caller in range(in_flight):
        requests = bodies(path, stream=stream, caller=caller)
        await loop.create_connection(partial(Caller, requests, tally), "127.0.0.1", port)
    async with asyncio.timeout(START_S):
        while not tally.answers:  # noqa: ASYNC110 the answers are counted, not announced
            await asyncio.sleep(0.05)
    await asyncio.sleep(round_s)
    costs, rates = [], []
    for _ in range(rounds):
        answers, cpu, began = tally.answers, cpu_s(pid), time.perf_counter()
        await asyncio.sleep(round_s)
        answered = tally.answers - answers
        if not answered:
            continue  # the server got no CPU time in this round
        costs.append((cpu_s(pid) - cpu) / answered * 1e6)
        rates.append(answered / (time.perf_counter() - began))
    tally.over = True
    if not costs:
        raise RuntimeError("no answers came")
    await asyncio.sleep(0.3)
    return Figure(statistics.median(costs), min(costs), statistics.median(rates))


@contextmanager
def running(pieces: int, core: int, profile: str | None = None) -> Iterator[tuple[int, int]]:
    """Start a server; yield its port and process id."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(pieces, core, profile, theirs), daemon=True)
    process.start()
    try:
        port = mine.recv()
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
        assert process.pid is not None
        yield port, process.pid
    finally:
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(20)
        process.kill()


def main(
    path: Annotated[str, typer.Option(help="/v1/chat/completions or /v1/generate.")] = "/v1/chat/completions",
    in_flight: Annotated[int, typer.Option(min=1, help="Connections.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    round_s: Annotated[float, typer.Option(min=0.1, help="Seconds a round.")] = 0.5,
    core: Annotated[int, typer.Option(help="The server's core; the client takes the others.")] = 0,
    only: Annotated[str, typer.Option(help="One case: json-1, sse-1 or sse-140.")] = "",
    profile: Annotated[str, typer.Option(help="Write a cProfile of each case to PROFILE.<case>.")] = "",
) -> None:
    """Print the CPU time of a request, JSON and streamed, and of a chunk."""
    others = os.sched_getaffinity(0) - {core}
    os.sched_setaffinity(0, others or {core})
    gc.disable()  # the collector of this client, which keeps nothing
    figures: dict[str, Figure] = {}
    for case, pieces, stream in (("json-1", 1, False), ("sse-1", 1, True), ("sse-140", OUTPUT_TOKENS, True)):
        if only and case != only:
            continue
        stats = f"{profile}.{case}" if profile else None
        with running(pieces, core, stats) as (port, pid):
            figures[case] = uvloop.run(
                load(port, pid, path, stream=stream, in_flight=in_flight, rounds=rounds, round_s=round_s)
            )
        if stats is not None:
            pstats.Stats(stats).sort_stats("tottime").print_stats(45)
    table = Table(title=f"{path}, {in_flight} in flight, one core")
    for heading in ("case", "CPU µs/request", "cheapest round", "requests/s"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case, figure in figures.items():
        table.add_row(case, f"{figure.cpu_us:.0f}", f"{figure.lowest_us:.0f}", f"{figure.per_second:.0f}")
    Console().print(table)
    if "sse-1" in figures and "sse-140" in figures:
        chunk_us = (figures["sse-140"].lowest_us - figures["sse-1"].lowest_us) / (OUTPUT_TOKENS - 1)
        print(f"a chunk: {chunk_us:.1f} µs CPU, {1e6 / chunk_us:,.0f} chunks a second and core")


if __name__ == "__main__":
    typer.run(main)
