"""What telemetry costs callers of a real engine; run by ``benchmarks.telemetry --engine embedded``.

Two gateways as configured by ``sluice.yaml``, each with its embedded engine and the demo model; one has all
telemetry on, the other has none. Rounds of 16 streams at once, 64 tokens each, alternate between them, with
the same prompts. All processes may use all cores, as on a production host.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.hot_path import KEY
from benchmarks.stages import WORDS
from benchmarks.telemetry_house import collect, running, serve

STREAMS: Final = 16
TOKENS: Final = 64
WORDS_ASKED: Final = 60
BAR: Final = 0.95
READY_S: Final = 180.0
HEADERS: Final = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@dataclass
class GatewayFigures:
    """One of the two gateways, and the figures of its rounds."""

    name: str
    port: int
    tokens_per_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    round_ttft_ms: list[float] = field(default_factory=list)


def print_engine(rounds: int, sample_ratio: float) -> None:
    """Measure and print; the first round of each side is not counted."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        collector, _ = stack.enter_context(running(collect, cores))
        endpoint = f"http://127.0.0.1:{collector}"
        gates = []
        for name, target in (("on", endpoint), ("off", None)):
            port, _ = stack.enter_context(running(serve, None, cores, target, sample_ratio))
            gates.append(GatewayFigures(name, port))
        for gate in gates:
            _until_ready(gate.port)
        callers = stack.enter_context(ThreadPoolExecutor(STREAMS))
        for number in range(rounds + 1):
            for gate in gates if number % 2 else reversed(gates):
                _round(gate, number, callers, counted=number > 0)
    _report(*gates)


def _until_ready(port: int) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            """The gateway does not listen yet."""
        time.sleep(0.5)
    raise SystemExit(f"the gateway on port {port} was not ready within {READY_S:g} s")


def _round(gate: GatewayFigures, number: int, callers: ThreadPoolExecutor, *, counted: bool) -> None:
    began = time.perf_counter()
    answers = list(callers.map(lambda caller: _stream(gate.port, number * STREAMS + caller), range(STREAMS)))
    took_s = time.perf_counter() - began
    if counted:
        waits = [ttft_ms for ttft_ms, _ in answers]
        gate.ttft_ms += waits
        gate.round_ttft_ms.append(statistics.median(waits))
        gate.tokens_per_s.append(sum(tokens for _, tokens in answers) / took_s)


def _stream(port: int, seed: int) -> tuple[float, int]:
    """Stream one answer; return the milliseconds to its first token, and its number of tokens."""
    rng = random.Random(seed)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(WORDS_ASKED))}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    began, first_ms, tokens = time.perf_counter(), 0.0, 0
    connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {answer.read()[:300]!r}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if not first_ms and any(choice["delta"].get("content") for choice in chunk["choices"]):
            first_ms = (time.perf_counter() - began) * 1000
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    if not first_ms or not tokens:
        raise SystemExit("an answer without tokens: the engine does not keep up, or is away")
    return first_ms, tokens


def _report(on: GatewayFigures, off: GatewayFigures) -> None:
    table = Table(title=f"everything told, beside nothing told: {STREAMS} streams of the embedded engine")
    for heading in ("", on.name, off.name, "ratio, 1 is free", "bar"):
        table.add_column(heading, justify="left" if not heading else "right")

    def row(name: str, exported: float, silent: float, ratio: float) -> None:
        table.add_row(
            name, f"{exported:.1f}", f"{silent:.1f}", f"{ratio:.3f}", "met" if ratio >= BAR else "missed"
        )

    def mid(values: list[float]) -> float:
        return statistics.median(values)

    rates = [a / b for a, b in zip(on.tokens_per_s, off.tokens_per_s, strict=True)]
    row("tokens/s", mid(on.tokens_per_s), mid(off.tokens_per_s), mid(rates))
    waits = [b / a for a, b in zip(on.round_ttft_ms, off.round_ttft_ms, strict=True)]
    row("TTFT p50 ms", mid(on.ttft_ms), mid(off.ttft_ms), mid(waits))
    late = [sorted(values)[int(len(values) * 0.99)] for values in (on.ttft_ms, off.ttft_ms)]
    row("TTFT p99 ms", late[0], late[1], late[1] / late[0])
    Console().print(table)
