"""Two workers behind one gateway: prefix cache hits with and without affinity, and a killed worker.

    python -m benchmarks.worker_affinity
    python -m benchmarks.worker_affinity --workers vllm --limit 250 --json

A row of a Mooncake trace lists the ids of its prompt's blocks of 512 tokens; equal ids at the beginning mean
an equal prefix. Each becomes one block of the workers' caches (8 tokens for Sluice's engine, 32 for vLLM on a
CPU), other lengths are scaled alike, and prompts are cut to the model's limit. Requests are sent at the
trace's times, divided by ``--speed``, as token ids through a gateway without an engine to two real workers.

The three policies get the same requests with different tokens, so none finds another's blocks; each worker's
pool holds about half of what the trace would fill. For round robin the client names the worker. The last run
kills one worker after two fifths of its requests (SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.sse import json_events
from ops.replay.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = REPOSITORY / "benchmarks" / "data" / "mooncake_synthetic_500.jsonl"
MODEL = REPOSITORY / "models" / "demo"
# Ids of text tokens: no special token is among them.
TOKEN_IDS = range(300, 1000)
MAX_MODEL_LEN = 4096
START_TIMEOUT_S = 400.0
ANSWER_TOKENS = 8
KEY = "benchmark-key-0123456789abcdef0123456789abcdef"
KILL_AT = 0.4


class Kind(StrEnum):
    """The kind of the workers."""

    SLUICE = "sluice"
    VLLM = "vllm"


class Policy(StrEnum):
    """How a worker is chosen."""

    AFFINITY = "affinity"
    LEAST_LOADED = "least loaded"
    ROUND_ROBIN = "round robin"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: its reported usage, the time of its first text, and its failure."""

    input_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float | None = None
    streamed: bool = False
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one policy's run. ``hit_rate`` is of all prompt tokens answered, 0 to 1."""

    policy: str
    requests: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    failed_before_a_token: int
    failed_after_a_token: int


@contextlib.contextmanager
def process(command: list[str], log: Path, url: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it is ready; end it with all its children after the block."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=REPOSITORY, env={**clean, **env}, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _ready(url):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[2]} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@contextlib.contextmanager
def worker(kind: Kind, folder: Path, blocks: int, block_tokens: int) -> Iterator[tuple[str, int]]:
    """Start a worker; yield its URL and its process group."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / f"worker-{port}.log"
    if kind is Kind.VLLM:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
        command += ["--served-model-name", "demo", "--port", str(port), "--host", "127.0.0.1"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(block_tokens)]
        command += ["--num-gpu-blocks-override", str(blocks), "--dtype", "float32", "--enforce-eager"]
        command += ["--enable-prompt-tokens-details", "--max-num-seqs", "16", "--api-key", KEY]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        ready = f"{url}/health"
    else:
        settings: dict[str, Any] = {
            "server": {"port": port},
            "engine": {
                "max_model_len": MAX_MODEL_LEN,
                "block_size": block_tokens,
                "num_blocks": blocks,
                "max_num_seqs": 16,
                "num_threads": 1,
            },
            "state": {"url": f"sqlite:///{folder}/state-{port}.db"},
            "ledger": {"url": f"sqlite+aiosqlite:///{folder}/ledger-{port}.db"},
            "admission": {"max_wait_ms": 600_000, "max_queue": 10_000},
        }
        command, env = _sluice(folder / f"worker-{port}.yaml", settings), {"SLUICE_ADMIN_KEY": KEY}
        ready = f"{url}/ready"
    with process(command, log, ready, **env) as child:
        yield url, child.pid


def _sluice(path: Path, settings: dict[str, Any]) -> list[str]:
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return [sys.executable, "-m", "ops.cli", "serve", "--config", str(path)]


@contextlib.contextmanager
def front(kind: Kind, folder: Path, urls: Sequence[str], block_tokens: int, affinity: bool) -> Iterator[str]:
    """Start the gateway: with the pool, and with each worker as a backend of its own for round robin."""
    port = free_port()
    common: dict[str, Any] = {"kind": "openai", "model": "demo", "dialect": kind.value, "prompt": "token_ids"}
    common |= {"affinity_block_tokens": block_tokens, "affinity": affinity, "api_key_env": "WORKER_KEY"}
    common |= {"probe_timeout_seconds": 10, "metrics_interval_seconds": 0.5}
    backends = {"pool": {**common, "base_urls": [f"{url}/v1" for url in urls]}}
    backends |= {f"one-{n}": {**common, "base_urls": [f"{url}/v1"]} for n, url in enumerate(urls)}
    routing = folder / f"routing-{port}.yaml"
    routes = {"main": {"backends": [{"name": "pool", "weight": 100}], "fallback": []}}
    routing.write_text(yaml.safe_dump({"routes": routes}), encoding="utf-8")
    settings = {
        "server": {"port": port},
        "engine": {"kind": "none", "tokenizer": str(MODEL), "max_model_len": MAX_MODEL_LEN},
        "backends": backends,
        "routing": {"file": str(routing)},
        "state": {"url": f"sqlite:///{folder}/state-{port}.db"},
        "ledger": {"url": f"sqlite+aiosqlite:///{folder}/ledger-{port}.db"},
        "admission": {"max_wait_ms": 600_000, "max_queue": 10_000},
    }
    command = _sluice(folder / f"front-{port}.yaml", settings)
    url = f"http://127.0.0.1:{port}"
    with process(command, folder / f"front-{port}.log", f"{url}/ready", SLUICE_ADMIN_KEY=KEY, WORKER_KEY=KEY):
        yield url


def prompt_of(row: TraceRequest, block_tokens: int, run: str) -> list[int]:
    """Tokens in which equal ids are equal blocks within a run, and nothing is equal between runs."""
    tokens: list[int] = []
    for block_id in row.block_ids:
        tokens += random.Random(f"{run} {block_id}").choices(TOKEN_IDS, k=block_tokens)
    length = max(1, round(row.input_tokens * block_tokens / MOONCAKE_BLOCK_TOKENS))
    return tokens[: min(length, MAX_MODEL_LEN - 2 * ANSWER_TOKENS)]


def ideal_rate(rows: Sequence[TraceRequest], block_tokens: int) -> tuple[float, int]:
    """Return the share of prompt tokens that one endless cache finds, and how many blocks it then has."""
    seen: set[int] = set()
    found = total = 0
    for row in rows:
        length = len(prompt_of(row, block_tokens, "ideal"))
        ids = row.block_ids[: -(-length // block_tokens)]
        leading = next((n for n, block_id in enumerate(ids) if block_id not in seen), len(ids))
        found += min(leading * block_tokens, length)
        total += length
        seen.update(ids)
    return found / total, len(seen)


async def ask(client: httpx.AsyncClient, prompt: list[int], model: str) -> Outcome:
    """Send one streamed request."""
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, ttft_ms, usage = time.perf_counter(), None, None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                reply = re.sub(r"\s+", " ", (await answer.aread()).decode(errors="replace"))[:200]
                return Outcome(failure=f"{answer.status_code}: {reply}")
            async for chunk in json_events(answer.aiter_bytes()):
                if "error" in chunk:
                    return Outcome(streamed=ttft_ms is not None, failure=str(chunk["error"]["code"]))
                if ttft_ms is None and any(choice["text"] for choice in chunk["choices"]):
                    ttft_ms = 1000 * (time.perf_counter() - began)
                usage = chunk.get("usage") or usage
    except httpx.HTTPError as error:
        return Outcome(streamed=ttft_ms is not None, failure=type(error).__name__)
    if usage is None:
        return Outcome(streamed=ttft_ms is not None, failure="no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Outcome(usage["prompt_tokens"], cached, ttft_ms, ttft_ms is not None)


async def replay(
    url: str,
    rows: Sequence[TraceRequest],
    block_tokens: int,
    name: str,
    policy: Policy,
    speed: float,
    kill: int | None,
) -> list[Outcome]:
    """Send every row at its time; ``kill`` is the process group of a worker to end on the way."""
    prompts = [prompt_of(row, block_tokens, name) for row in rows]
    outcomes: list[Outcome | None] = [None] * len(rows)
    headers = {"authorization": f"Bearer {KEY}", "prefer": "sluice-no-fallback"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:

        async def one(number: int) -> None:
            model = f"one-{number % 2}" if policy is Policy.ROUND_ROBIN else "pool"
            outcomes[number] = await ask(client, prompts[number], model)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, row in enumerate(rows):
                await asyncio.sleep(max(0.0, row.at_s / speed - (time.perf_counter() - began)))
                group.create_task(one(number))
                if kill is not None and number == round(KILL_AT * len(rows)):
                    os.killpg(kill, signal.SIGKILL)
    return [outcome for outcome in outcomes if outcome is not None]


def summarize(policy: str, outcomes: Sequence[Outcome]) -> Run:
    """Return the figures of a run."""
    good = [one for one in outcomes if one.failure is None]
    times = sorted(one.ttft_ms for one in good if one.ttft_ms is not None) or [0.0]
    return Run(
        policy=policy,
        requests=len(outcomes),
        hit_rate=sum(one.cached_tokens for one in good) / max(1, sum(one.input_tokens for one in good)),
        ttft_p50_ms=statistics.median(times),
        ttft_p99_ms=times[min(len(times) - 1, int(0.99 * len(times)))],
        failed_before_a_token=sum(one.failure is not None and not one.streamed for one in outcomes),
        failed_after_a_token=sum(one.failure is not None and one.streamed for one in outcomes),
    )


def main(
    workers: Annotated[Kind, typer.Option(help="what the workers are")] = Kind.SLUICE,
    trace: Annotated[Path, typer.Option(help="a Mooncake trace")] = TRACE,
    limit: Annotated[int, typer.Option(help="rows to replay")] = 500,
    speed: Annotated[float, typer.Option(help="divides the times of the trace")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Replays the trace under each policy, then kills a worker."""
    block_tokens = 32 if workers is Kind.VLLM else 8
    rows = read_trace(trace, limit=limit).arrivals
    ideal, all_blocks = ideal_rate(rows, block_tokens)
    blocks = max(all_blocks // 2, MAX_MODEL_LEN // block_tokens + 64)
    runs, failures = [], set()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        started = [stack.enter_context(worker(workers, folder, blocks, block_tokens)) for _ in range(2)]
        urls = [url for url, _ in started]
        for number, policy in enumerate((*Policy, Policy.AFFINITY)):
            kill = started[1][1] if number == len(Policy) else None
            title = policy.value if kill is None else "affinity, one worker killed"
            with front(workers, folder, urls, block_tokens, policy is Policy.AFFINITY) as url:
                outcomes = asyncio.run(replay(url, rows, block_tokens, title, policy, speed, kill))
            runs.append(summarize(title, outcomes))
            failures |= {one.failure for one in outcomes if one.failure is not None}
    about = (
        f"{len(rows)} rows of {trace.name}, a block is {block_tokens} tokens, times / {speed:g}, "
        f"two {workers.value} workers with {blocks} of {all_blocks} blocks each"
    )
    if as_json:
        facts = {"about": about, "ideal": ideal, "failures": sorted(failures)}
        print(json.dumps({**facts, "runs": [asdict(run) for run in runs]}))
        return
    table = Table(title=f"{about}; ideal {ideal:.1%}")
    for heading in ("policy", "requests", "hit rate", "TTFT p50 ms", "p99", "failed before a token", "after"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for run in runs:
        table.add_row(
            run.policy,
            str(run.requests),
            f"{run.hit_rate:.1%}",
            f"{run.ttft_p50_ms:.0f}",
            f"{run.ttft_p99_ms:.0f}",
            str(run.failed_before_a_token),
            str(run.failed_after_a_token),
        )
    console = Console(width=110)
    console.print(table)
    for failure in sorted(failures):
        console.print(f"failure: {failure}", markup=False)


if __name__ == "__main__":
    typer.run(main)
