"""What each further model costs: start time, memory and CPU per request, with 1 and with 100 models.

    python -m benchmarks.many_models

Both gateways run at the same time, each in front of a fake worker that lists that many models. They get some
requests each in turn; the gateway of many models gets each for another model. The cost of a request is the
CPU time of the gateway's processes.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.forwarding.gateways import KEY, python_module
from benchmarks.forwarding.processes import ask, free_port, started, wait_until_ready
from benchmarks.forwarding.workload import MODEL, Regime, bodies

START_TIMEOUT_S = 120.0
WARM_UP = 300
IDLE_S = 35.0  # a round of inspections begins every 30 s


@dataclass(frozen=True, slots=True)
class Served:
    """A running gateway; ``start_s`` are the seconds until it served all its models."""

    models: tuple[str, ...]
    port: int
    process: psutil.Process
    start_s: float

    def cpu_s(self) -> float:
        """Return the CPU seconds of the gateway and its child processes so far."""
        times = [one.cpu_times() for one in (self.process, *self.process.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def memory_mib(self) -> float:
        """Resident memory of the gateway's own process."""
        return float(self.process.memory_info().rss) / 2**20


@contextmanager
def serving(count: int, folder: Path) -> Iterator[Served]:
    """Start a gateway in front of a worker of ``count`` models, which it discovers from the worker."""
    folder.mkdir()
    models = tuple(f"model-{number}" for number in range(count))
    worker_port, port = free_port(), free_port()
    (folder / "sluice.yaml").write_text(
        f"""
server: {{port: {port}}}
engine: {{kind: none, tokenizer: models/demo, max_model_len: 4096}}
backends: {{gpus: {{kind: openai, base_urls: ["http://127.0.0.1:{worker_port}/v1"]}}}}
state: {{url: "sqlite:///{folder}/state.db"}}
ledger: {{url: "sqlite+aiosqlite:///{folder}/ledger.db"}}
routing: {{file: {folder}/routing.yaml}}
"""
    )
    (folder / "routing.yaml").write_text("routes: {chat: {backends: [{name: gpus}]}}")
    logs = folder / "worker.log", folder / "gateway.log"
    with started(python_module("benchmarks.forwarding.worker", worker_port, *models), logs[0]) as worker:
        wait_until_ready(worker, worker_port, "/health", logs[0])
        began = time.monotonic()
        command = python_module("ops.cli", "serve", "--config", folder / "sluice.yaml")
        with started(command, logs[1], {"SLUICE_ADMIN_KEY": KEY}) as gateway:
            wait_until_ready(gateway, port, "/ready", logs[1])
            while not {*models} <= {
                one["id"] for one in json.loads(ask(port, "GET", "/v1/models")[1])["data"]
            }:
                if time.monotonic() > began + START_TIMEOUT_S:
                    raise RuntimeError("it does not serve all models")
                time.sleep(0.01)
            yield Served(models, port, psutil.Process(gateway.pid), time.monotonic() - began)


def send(served: Served, requests: int, seed: str, models: int) -> float:
    """Send requests one after the other; return the gateway's CPU milliseconds per request."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    texts, names = bodies(Regime.CONVERSATION, stream=False, seed=seed), cycle(served.models[:models])
    before = served.cpu_s()
    for _ in range(requests):
        body, ticket = next(texts)
        named = body.replace(f'"model":"{MODEL}"'.encode(), f'"model":"{next(names)}"'.encode())
        connection.request("POST", "/v1/chat/completions", named, headers)
        answer = connection.getresponse()
        if answer.status != 200 or ticket.encode() not in answer.read():
            raise RuntimeError(f"a wrong answer: {answer.status}")
    connection.close()
    return (served.cpu_s() - before) / requests * 1000


def paired(one: Served, many: Served, rounds: int, requests: int, models: int) -> list[tuple[float, float]]:
    """Return the CPU milliseconds per request of both gateways, measured in turn."""
    pairs = []
    for number in range(rounds):
        order = (one, many) if number % 2 else (many, one)
        took = {served.port: send(served, requests, f"round {number}", models) for served in order}
        pairs.append((took[one.port], took[many.port]))
    return pairs


def main(
    models: Annotated[int, typer.Option(min=2, help="Models of the second gateway.")] = 100,
    rounds: Annotated[int, typer.Option(min=2)] = 20,
    requests: Annotated[int, typer.Option(min=10, help="Of each gateway in a round.")] = 300,
) -> None:
    """Measure both gateways, and print the figures."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        one, many = (opened.enter_context(serving(count, Path(folder) / str(count))) for count in (1, models))
        fresh = one.memory_mib(), many.memory_mib()
        idle = [-served.cpu_s() for served in (one, many)]
        time.sleep(IDLE_S)
        idle = [(before + served.cpu_s()) / IDLE_S for before, served in zip(idle, (one, many), strict=True)]
        for served in (one, many):
            send(served, WARM_UP, "warm up", models)
        alike = paired(one, many, rounds, requests, 1)
        mixed = paired(one, many, rounds, requests, models)
        used = one.memory_mib(), many.memory_mib()
    rows = (
        ("start until all are served, s", one.start_s, many.start_s),
        ("memory after the start, MiB", *fresh),
        (f"memory after {WARM_UP + 2 * rounds * requests} requests, MiB", *used),
        ("processor while idle, % of a core", 100 * idle[0], 100 * idle[1]),
    )
    print(f"{'':52} {'1 model':>9} {f'{models} models':>11}")
    for name, *figures in rows:
        print(f"{name:52} {figures[0]:9.2f} {figures[1]:11.2f}")
    for name, pairs in (("always the same model", alike), ("another model each time", mixed)):
        first, second = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        ratios = sorted(after / before for before, after in pairs)
        quarters = f"quarters {ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
        print(f"{f'processor for a request, ms: {name}':52} {first:9.2f} {second:11.2f}")
        print(f"    ratio of {rounds} pairs: median {statistics.median(ratios):.3f}, {quarters}")


if __name__ == "__main__":
    typer.run(main)
