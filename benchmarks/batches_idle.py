"""Do batches use idle capacity only? Three measurements.

    python -m benchmarks.batches_idle                     # ten minutes, needs vLLM
    python -m benchmarks.batches_idle --only turns        # without vLLM

- ``tokens``: output tokens per second of a batch alone on in-process vLLM, compared with ``vllm run-batch``
  of the same file and engine flags. They run in turn, and the other is suspended meanwhile. run-batch's own
  progress bar gives its rate, so the start of neither counts.
- ``prefixes``: shuffled lines of many groups, each with a long common beginning: cached prompt tokens against
  the highest possible number (all lines but the first of each group), in a pool that holds few groups.
- ``turns``: times to callers' first tokens with a full queue of batches and without one, in turn, in front of
  a worker whose steps take a GPU's time whatever their batch holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import KEY as FORWARDING_KEY
from benchmarks.forwarding.gateways import Name, python_module, recipe
from benchmarks.forwarding.processes import ask, started, wait_until_ready
from benchmarks.forwarding.workload import Regime, bodies
from benchmarks.responses_kill import bearer
from benchmarks.sse import json_events
from benchmarks.vllm_server import END_TOKEN, KEY, REPOSITORY, Flags, free_port, questions, sluice

ENDED: Final = ("completed", "failed", "expired", "cancelled")
LOOK_S: Final = 0.1
TOKENS: Final = 64
# Spans are sent to this address and lost.
NOWHERE: Final = "http://127.0.0.1:9"
# The same scheduling policy as vLLM has inside Sluice.
RUN_BATCH: Final = ("--scheduling-policy", "priority", "--seed", "0")
STEP_MS, PREFILL_MS = 40, 150
TURNS_A_S: Final = 4.0
QUEUE: Final = 5_000


def line(number: int, body: dict[str, Any]) -> str:
    """Return a line of a batch's input file."""
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": f"r-{number}", "method": "POST", "url": url, "body": body})


async def submit(session: aiohttp.ClientSession, url: str, key: str, lines: Sequence[str]) -> str:
    """Submit a batch, and return its id."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(lines), filename="lines.jsonl")
    async with session.post(f"{url}/v1/files", data=form, headers=bearer(key)) as answer:
        file = (await answer.json())["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with session.post(f"{url}/v1/batches", json=body, headers=bearer(key)) as answer:
        return str((await answer.json())["id"])


async def batch_of(session: aiohttp.ClientSession, url: str, key: str, batch: str) -> dict[str, Any]:
    """Return the batch's current state."""
    async with session.get(f"{url}/v1/batches/{batch}", headers=bearer(key)) as answer:
        return dict(await answer.json())


async def run_batch(
    session: aiohttp.ClientSession, url: str, lines: Sequence[str]
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the first line's start to the last line's end, and the results."""
    batch = await submit(session, url, KEY, lines)
    began: float | None = None
    while True:
        seen = await batch_of(session, url, KEY, batch)
        if began is None and seen["status"] != "validating":
            began = time.perf_counter()
        if seen["request_counts"]["completed"] == len(lines) or seen["status"] in ENDED:
            seconds = time.perf_counter() - (began or 0.0)
            break
        await asyncio.sleep(LOOK_S)
    while seen["status"] not in ENDED:
        await asyncio.sleep(LOOK_S)
        seen = await batch_of(session, url, KEY, batch)
    content = f"{url}/v1/files/{seen['output_file_id']}/content"
    async with session.get(content, headers=bearer(KEY)) as answer:
        return seconds, [json.loads(row) for row in (await answer.text()).splitlines()]


def vllm_batch(flags: Flags, folder: Path, lines: Sequence[str]) -> float:
    """Return how many seconds ``vllm run-batch`` reports for the lines."""
    given, out = folder / "in.jsonl", folder / "out.jsonl"
    given.write_text("\n".join(lines))
    options = {
        "-i": str(given),
        "-o": str(out),
        "--model": flags.model,
        "--served-model-name": Path(flags.model).name,
        "--dtype": flags.dtype,
        "--max-model-len": str(flags.max_model_len),
        "--block-size": str(flags.block_size),
        "--max-num-seqs": str(flags.max_num_seqs),
        "--max-num-batched-tokens": str(flags.max_num_batched_tokens),
        "--kv-cache-memory-bytes": str(flags.kv_cache_bytes),
    }
    module = "vllm.entrypoints.launchers.run_batch"  # vLLM's CPU build has no command for it
    words = [*python_module(module), *(part for pair in options.items() for part in pair), *RUN_BATCH]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(words, cwd=folder, env=quiet, capture_output=True, text=True, check=False)
    found = re.findall(r"100%[^\n]*?([\d.]+)req/s", done.stdout + done.stderr)
    if done.returncode or not found:
        raise RuntimeError(f"vllm run-batch ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return len(lines) / float(found[-1])


async def tokens(console: Console, rounds: int, lines: int) -> None:
    """Compare a batch alone with run-batch."""
    flags = Flags(str(REPOSITORY / "models" / "demo"))
    model = Path(flags.model).name
    asked = [
        line(
            number,
            {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": TOKENS,
                "temperature": 0,
                "logit_bias": {END_TOKEN: -100},
            },
        )
        for number, question in enumerate(questions(lines, "batch"))
    ]
    table = Table("round", "Sluice, tokens/s", "vllm run-batch, tokens/s", "ratio")
    ratios = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = sluice(flags, folder, NOWHERE)
        stack.callback(server.close)
        await server.wait_ready("/ready")
        async with aiohttp.ClientSession() as session:
            await run_batch(session, server.url, asked[:64])
            for number in range(rounds):
                seconds, done = await run_batch(session, server.url, asked)
                made = sum(row["response"]["body"]["usage"]["completion_tokens"] for row in done)
                with server.suspended():
                    theirs = vllm_batch(flags, folder, asked)
                ratios.append(theirs / seconds)
                ours = f"{made / seconds:.0f}"
                table.add_row(str(number + 1), ours, f"{lines * TOKENS / theirs:.0f}", f"{ratios[-1]:.2f}")
    console.print(table)
    console.print(f"tokens: {statistics.median(ratios):.2f} of run-batch (median; bar 0.90)")


async def prefixes(console: Console, groups: int, in_each: int) -> None:
    """Compare the cached prompt tokens with the highest possible number."""
    draw = random.Random(3)
    flags = Flags(str(REPOSITORY / "models" / "demo"), kv_cache_bytes=1 << 26)
    beginnings = ["\n".join(questions(6, f"group {group}")) for group in range(groups)]
    bodies_of = [
        {
            "model": Path(flags.model).name,
            "messages": [{"role": "user", "content": f"{beginning}\nNow number {number}."}],
            "max_tokens": 8,
        }
        for beginning in beginnings
        for number in range(in_each)
    ]
    draw.shuffle(bodies_of)
    asked = [line(number, body) for number, body in enumerate(bodies_of)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = sluice(flags, folder, NOWHERE)
        stack.callback(server.close)
        await server.wait_ready("/ready")
        async with aiohttp.ClientSession() as session:
            _, done = await run_batch(session, server.url, asked)
    usage = [row["response"]["body"]["usage"] for row in done]
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    # The last line of a group finds all blocks of its beginning, and so may every line but the first.
    most = max(one["prompt_tokens_details"]["cached_tokens"] for one in usage) * groups * (in_each - 1)
    share = f"{cached / most:.3f}"
    console.print(f"prefixes: {len(done)} lines of {groups} groups, {share} of the most (bar 0.95)")


async def first_token_s(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Time to the first token of a stream that is read to its end."""
    began, first = time.perf_counter(), 0.0
    headers = {**bearer(FORWARDING_KEY), "content-type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
        answer.raise_for_status()
        async for event in json_events(answer.content.iter_any()):
            if not first and event.get("choices") and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
    return first


async def turns_for(url: str, seconds: float, seed: str) -> list[float]:
    """Return the times to the first token of turns that arrive at random."""
    draw, texts = random.Random(seed), bodies(Regime.CONVERSATION, stream=True, seed=seed)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        running = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            await asyncio.sleep(draw.expovariate(TURNS_A_S))
            running.append(tasks.create_task(first_token_s(session, url, next(texts)[0])))
    return [one.result() for one in running]


async def turns(console: Console, rounds: int, seconds: float) -> None:
    """Compare the times to the first token with a full queue of batches and without one."""
    port, worker_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    texts = bodies(Regime.CONVERSATION, stream=False, seed="batch")
    queue = [line(number, json.loads(next(texts)[0])) for number in range(QUEUE)]
    times: dict[bool, list[float]] = {False: [], True: []}
    p99s: dict[bool, list[float]] = {False: [], True: []}
    ran = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = recipe(Name.SLUICE, folder=folder, port=port, worker_port=worker_port)
        logs = folder / "worker.log", folder / "gateway.log"
        environment = {**made.environment, "SLUICE_BATCHES__FOLDER": str(folder / "files")}
        with (
            started(python_module("benchmarks.forwarding.worker", worker_port), logs[0]) as worker,
            started(made.command, logs[1], environment) as gateway,
        ):
            wait_until_ready(worker, worker_port, "/health", logs[0])
            wait_until_ready(gateway, port, "/ready", logs[1])
            ask(worker_port, "POST", "/control", {"step_ms": STEP_MS, "prefill_ms": PREFILL_MS})
            await turns_for(url, 10.0, "warm up")
            async with aiohttp.ClientSession() as session:
                for number in range(rounds):
                    for full in (False, True) if number % 2 else (True, False):
                        batch = await submit(session, url, FORWARDING_KEY, queue) if full else None
                        await asyncio.sleep(10.0 if full else 1.0)
                        found = await turns_for(url, seconds, str(number))
                        times[full] += found
                        p99s[full].append(statistics.quantiles(found, n=100)[98])
                        if batch is not None:
                            seen = await batch_of(session, url, FORWARDING_KEY, batch)
                            ran += seen["request_counts"]["completed"]
                            if seen["status"] != "in_progress":
                                raise RuntimeError(f"the queue was not full to the end: {seen['status']}")
                            path = f"{url}/v1/batches/{batch}/cancel"
                            await (await session.post(path, headers=bearer(FORWARDING_KEY))).read()
    table = Table("queue of batches", "turns", "TTFT p50 ms", "p99 ms", "p99 by round, median")
    for full in (False, True):
        cuts = statistics.quantiles(times[full], n=100)
        table.add_row(
            f"full, {ran} lines ended" if full else "empty",
            str(len(times[full])),
            f"{cuts[49] * 1000:.1f}",
            f"{cuts[98] * 1000:.1f}",
            f"{statistics.median(p99s[full]) * 1000:.1f}",
        )
    console.print(table)
    change = statistics.quantiles(times[True], n=100)[98] / statistics.quantiles(times[False], n=100)[98] - 1
    console.print(f"turns: p99 {change:+.1%} (bar +5 %)")


def main(
    only: Annotated[str | None, typer.Option(help="tokens, prefixes or turns.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    lines: Annotated[int, typer.Option(min=64, help="Of the batch whose tokens are counted.")] = 512,
    seconds: Annotated[float, typer.Option(min=5, help="Of turns, each time.")] = 30.0,
) -> None:
    """Measure, and print the figures."""
    console = Console(width=120)
    if only in (None, "tokens"):
        asyncio.run(tokens(console, rounds, lines))
    if only in (None, "prefixes"):
        asyncio.run(prefixes(console, groups=12, in_each=24))
    if only in (None, "turns"):
        asyncio.run(turns(console, rounds, seconds))


if __name__ == "__main__":
    typer.run(main)
