"""How long ``/v1/messages/count_tokens`` takes for a long conversation whose beginning was counted before.

    python -m benchmarks.count_tokens

One gateway process, one connection. Each request has the same long beginning and a last message of its own.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.forwarding.gateways import KEY, Name, python_module, recipe
from benchmarks.forwarding.processes import free_port, started, wait_until_ready
from benchmarks.forwarding.workload import MODEL

WARM_UP = 3
LAST_WORDS = 30
HEADERS = {"x-api-key": KEY, "content-type": "application/json", "anthropic-version": "2023-06-01"}


def main(
    words: Annotated[int, typer.Option(min=100, help="Of the beginning, each about five tokens.")] = 11_000,
    messages: Annotated[int, typer.Option(min=1, help="Messages of the beginning.")] = 100,
    requests: Annotated[int, typer.Option(min=10)] = 1_000,
) -> None:
    """Print the median and the 99th percentile."""
    draw = random.Random(1)
    known = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3_000)]

    def text(count: int) -> str:
        return " ".join(draw.choices(known, k=count))

    roles = ("user", "assistant")
    beginning = [{"role": roles[i % 2], "content": text(words // messages)} for i in range(messages)]
    port, worker_port = free_port(), free_port()
    times, tokens = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = recipe(Name.SLUICE, folder=folder, port=port, worker_port=worker_port)
        logs = folder / "worker.log", folder / "gateway.log"
        with (
            started(python_module("benchmarks.forwarding.worker", worker_port), logs[0]) as worker,
            started(made.command, logs[1], dict(made.environment)) as gateway,
        ):
            wait_until_ready(worker, worker_port, "/health", logs[0])
            wait_until_ready(gateway, port, "/ready", logs[1])
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for _ in range(requests + WARM_UP):
                last = {"role": "user", "content": text(LAST_WORDS)}
                body = json.dumps({"model": MODEL, "messages": [*beginning, last]})
                began = time.perf_counter()
                connection.request("POST", "/v1/messages/count_tokens", body, HEADERS)
                answer = connection.getresponse().read()
                times.append((time.perf_counter() - began) * 1000)
                tokens = json.loads(answer)["input_tokens"]
    counted = sorted(times[WARM_UP:])
    print(
        f"{tokens} tokens in {messages + 1} messages, {requests} requests: "
        f"p50 {counted[len(counted) // 2]:.1f} ms, p99 {counted[int(len(counted) * 0.99) - 1]:.1f} ms"
    )


if __name__ == "__main__":
    typer.run(main)
