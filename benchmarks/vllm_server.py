"""Sluice with vLLM in process against vLLM's own OpenAI server: same model, flags and requests, in turn.

    python -m benchmarks.vllm_server                (options: --help)

Both are started once and warmed up. A round runs every concurrency on one, then on the other; the waiting one
is suspended, and which one is first alternates. Callers stream chat completions of a fixed number of tokens
over keep-alive connections, one request at a time each; every round has new questions, the same for both.
Sluice runs its whole journey: keys, budget, admission, routing, ledger, metrics, and spans sent to a
collector (a sink here).

Shown are medians over the rounds. "API CPU" is the CPU time of the process that serves HTTP, in seconds per
1,000 requests: for Sluice the gateway, for vLLM its API server. All processes below it (engine core, worker)
are "engine CPU". With --api-servers there is a third side: vLLM with that many API servers, whose time is
added up; with --rust another one: vLLM with its HTTP layer in Rust, `vllm-rs`. With --in-front there are two
gateways whose worker is vLLM's server: Sluice, and a bare proxy of FastAPI and aiohttp; "engine CPU" is then
that of all of vLLM's processes. The load generator is the benchmark's own process and shares the machine with
all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import numpy as np
import psutil
import typer
from aiohttp import web
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import Name, recipe

REPOSITORY = Path(__file__).resolve().parent.parent
KEY = "benchmark-key-0123456789abcdef0123456789abcdef"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
WORDS = ("manga", "volume", "order", "price", "author", "series", "shipping", "return", "release", "chapter")
QUESTION_WORDS = 120
# Forbids the end token, so that every answer has the same length on both sides.
END_TOKEN = "2"


@dataclass(frozen=True, slots=True)
class Flags:
    """The settings that both engines get."""

    model: str
    dtype: str = "float32"
    max_model_len: int = 4096
    block_size: int = 32
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    kv_cache_bytes: int = 1 << 30
    load_format: str = "auto"
    gpu_memory_utilization: float = 0.92


@dataclass(frozen=True, slots=True)
class Run:
    """One side at one concurrency in one round."""

    elapsed_s: float
    tokens: int
    requests: int
    failed: int
    ttft_s: list[float]
    tpot_s: list[float]
    api_cpu_s: float
    engine_cpu_s: float
    chunks: int


# Runs `vllm serve`, which asks for the version of the distribution "vllm"; the CPU build has another name.
SERVE = """
import importlib.metadata
try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
# vLLM's names of the processes that serve HTTP, where the root process does not.
API_SERVERS = ("VLLM::APIServer", "vllm-rs")


class Server:
    """A server's process tree: its root and API servers serve HTTP, all other processes are the engine."""

    def __init__(
        self,
        name: str,
        model: str,
        command: Sequence[str],
        env: dict[str, str],
        url: str,
        log: Path,
        cwd: Path = REPOSITORY,
        worker: Server | None = None,
    ):
        self.name = name
        self.worker = worker
        self.model = model
        self.url = url
        self.log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, cwd=cwd, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT
            )
        self.root = psutil.Process(self._process.pid)

    def tree(self) -> list[psutil.Process]:
        """Return the root process and all its descendants."""
        return [self.root, *self.root.children(recursive=True)]

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds so far: of the processes that serve HTTP, and of the others."""
        api, engine = 0.0, sum(self.worker.cpu_s()) if self.worker else 0.0
        for process in self.tree():
            used = sum(process.cpu_times()[:2])
            if process == self.root or process.name().startswith(API_SERVERS):
                api += used
            else:
                engine += used
        return api, engine

    def rss_mib(self) -> float:
        """Resident memory of the root."""
        return float(self.root.memory_info().rss) / 2**20

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the whole tree during the block, so that its idle loops take no CPU from the other."""
        tree = self.tree()
        for process in tree:
            process.suspend()
        try:
            yield
        finally:
            for process in tree:
                process.resume()

    async def wait_ready(self, path: str) -> None:
        """Wait until ``path`` answers 200."""
        deadline = time.monotonic() + START_TIMEOUT_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(self.url + path) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.25)
        raise RuntimeError(f"{self.name} was not ready:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        """Stop the server, and every process that it may leave."""
        tree = self.tree() if self.root.is_running() else []
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def sluice(flags: Flags, folder: Path, collector: str) -> Server:
    """Start `sluice serve` with vLLM in process, with every stage on."""
    port = free_port()
    env = {
        "SLUICE_ADMIN_KEY": KEY,
        "SLUICE_SERVER__PORT": str(port),
        "SLUICE_ENGINE__KIND": "vllm",
        "SLUICE_ENGINE__MODEL": flags.model,
        "SLUICE_ENGINE__DTYPE": flags.dtype,
        "SLUICE_ENGINE__MAX_MODEL_LEN": str(flags.max_model_len),
        "SLUICE_ENGINE__BLOCK_SIZE": str(flags.block_size),
        "SLUICE_ENGINE__MAX_NUM_SEQS": str(flags.max_num_seqs),
        "SLUICE_ENGINE__MAX_NUM_BATCHED_TOKENS": str(flags.max_num_batched_tokens),
        "SLUICE_ENGINE__KV_CACHE_BYTES": str(flags.kv_cache_bytes),
        "SLUICE_ENGINE__GPU_MEMORY_UTILIZATION": str(flags.gpu_memory_utilization),
        "SLUICE_ENGINE__EXTRA_ARGS": json.dumps({"load_format": flags.load_format}),
        "SLUICE_ENGINE__SEED": "0",
        "SLUICE_ENGINE__MAX_LORAS": "0",
        "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
        "SLUICE_TRACING__OTLP_ENDPOINT": collector,
        # All requests must be answered, as vLLM answers them: none is refused for its wait.
        "SLUICE_ADMISSION__MAX_WAIT_MS": "600000",
    }
    command = [sys.executable, "-m", "ops.cli", "serve", "--config", "sluice.yaml"]
    model = Path(flags.model).name
    return Server("sluice", model, command, env, f"http://127.0.0.1:{port}", folder / "sluice.log")


def vllm(flags: Flags, folder: Path, api_servers: int = 1, *, rust: bool = False) -> Server:
    """Start vLLM's own OpenAI server, with ``api_servers`` processes that serve HTTP, or with one in Rust."""
    port = free_port()
    options = {
        "--served-model-name": Path(flags.model).name,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": flags.dtype,
        "--max-model-len": str(flags.max_model_len),
        "--block-size": str(flags.block_size),
        "--max-num-seqs": str(flags.max_num_seqs),
        "--max-num-batched-tokens": str(flags.max_num_batched_tokens),
        "--kv-cache-memory-bytes": str(flags.kv_cache_bytes),
        "--gpu-memory-utilization": str(flags.gpu_memory_utilization),
        "--load-format": flags.load_format,
        "--scheduling-policy": "priority",
        "--seed": "0",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", flags.model]
    name = "vllm"
    if api_servers > 1 or rust:
        command = [sys.executable, "-c", SERVE, "serve", flags.model]
        options["--api-server-count"] = str(api_servers)
        name = "vllm-rs" if rust else f"vllm × {api_servers}"
    command += [part for pair in options.items() for part in pair]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_USE_RUST_FRONTEND": "1"} if rust else {}
    model = Path(flags.model).name
    return Server(name, model, command, env, f"http://127.0.0.1:{port}", folder / f"{name}.log")


def in_front(name: Name, worker: Server, folder: Path) -> Server:
    """Start a gateway of `benchmarks.forwarding` that has ``worker`` as its worker."""
    port = free_port()
    home = folder / name
    home.mkdir()
    worker_port = int(worker.url.rpartition(":")[2])
    made = recipe(name, folder=home, port=port, worker_port=worker_port, model=worker.model)
    env = {**made.environment, "SLUICE_ADMIN_KEY": KEY}
    url = f"http://127.0.0.1:{port}"
    return Server(f"{name} + vllm", worker.model, made.command, env, url, home / "log", worker=worker)


# The shape of Llama 3.1 8B with the demo model's vocabulary.
SHAPE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def shape_of_8b(folder: Path) -> Path:
    """Write a model folder without weights: the engine draws them (vLLM's ``--load-format dummy``)."""
    demo = REPOSITORY / "models" / "demo"
    made = folder / "shape-8b"
    shutil.copytree(demo, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((demo / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, **SHAPE_8B}))
    return made


def questions(count: int, seed: str) -> list[str]:
    """Return texts of about 200 tokens, each with a different beginning."""
    rng = random.Random(seed)
    return [f"{rng.randrange(10**9)} " + " ".join(rng.choices(WORDS, k=QUESTION_WORDS)) for _ in range(count)]


async def ask(
    session: aiohttp.ClientSession, server: Server, question: str, tokens: int
) -> tuple[float, float, int, int] | None:
    """Return seconds to the first text and from it to the last, tokens, chunks; ``None`` on failure."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "logit_bias": {END_TOKEN: -100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    first = last = 0.0
    chunks, last_line = 0, b""
    async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            return None
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunks += 1
            last_line = line
            if re.search(rb'"content":\s*"[^"]', line):
                last = time.perf_counter()
                first = first or last
    usage = json.loads(last_line[6:]).get("usage")
    if not usage or not first:
        return None
    return first - begun, last - first, usage["completion_tokens"], chunks


async def drive(server: Server, asked: Sequence[str], concurrency: int, tokens: int) -> Run:
    """Send all questions, ``concurrency`` at a time."""
    waiting = iter(asked)
    done: list[tuple[float, float, int, int] | None] = []
    headers = {"Authorization": f"Bearer {KEY}"}
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def caller() -> None:
            while (question := next(waiting, None)) is not None:
                done.append(await ask(session, server, question, tokens))

        api, engine = server.cpu_s()
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(caller())
        elapsed = time.perf_counter() - begun
        api_after, engine_after = server.cpu_s()
    good = [one for one in done if one is not None]
    return Run(
        elapsed_s=elapsed,
        tokens=sum(one[2] for one in good),
        requests=len(done),
        failed=len(done) - len(good),
        ttft_s=[one[0] for one in good],
        tpot_s=[one[1] / max(1, one[2] - 1) for one in good],
        api_cpu_s=api_after - api,
        engine_cpu_s=engine_after - engine,
        chunks=sum(one[3] for one in good),
    )


def summarize(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over the rounds."""

    def median(value: Callable[[Run], float]) -> float:
        return statistics.median(value(run) for run in runs)

    def at(times: Sequence[float], p: float) -> float:
        return float(np.percentile(times, p)) * 1e3 if times else float("nan")

    return {
        "tokens_per_s": median(lambda run: run.tokens / run.elapsed_s),
        "ttft_p50_ms": median(lambda run: at(run.ttft_s, 50)),
        "ttft_p99_ms": median(lambda run: at(run.ttft_s, 99)),
        "tpot_p50_ms": median(lambda run: at(run.tpot_s, 50)),
        "api_cpu_s_per_1000": median(lambda run: run.api_cpu_s / run.requests * 1e3),
        "engine_cpu_s_per_1000": median(lambda run: run.engine_cpu_s / run.requests * 1e3),
        "tokens_per_chunk": median(lambda run: run.tokens / max(1, run.chunks)),
        "failed": sum(run.failed for run in runs),
    }


def show(console: Console, rows: dict[tuple[str, int], dict[str, float]], levels: Sequence[int]) -> None:
    """Print one table of all servers, and Sluice's ratio to each of the others."""
    table = Table(title="medians over the rounds; ratio: Sluice / the one above")
    names = {
        "tokens_per_s": "tok/s",
        "ttft_p50_ms": "TTFT p50 ms",
        "ttft_p99_ms": "TTFT p99 ms",
        "tpot_p50_ms": "TPOT p50 ms",
        "api_cpu_s_per_1000": "API CPU s/1000",
        "engine_cpu_s_per_1000": "engine CPU s/1000",
        "tokens_per_chunk": "tok/chunk",
        "failed": "failed",
    }
    table.add_column("callers", justify="right")
    table.add_column("")
    for heading in names.values():
        table.add_column(heading, justify="right")
    for level in levels:
        ours = rows["sluice", level]
        table.add_row(str(level), "sluice", *[f"{ours[key]:.1f}" for key in names])
        for name in [name for name, at in rows if at == level and name != "sluice"]:
            theirs = rows[name, level]
            table.add_row(str(level), name, *[f"{theirs[key]:.1f}" for key in names])
            ratios = [f"{ours[key] / theirs[key]:.2f}" if theirs[key] else "" for key in names]
            table.add_row("", "ratio", *ratios)
        table.add_section()
    console.print(table)


@contextmanager
def profiled(server: Server, path: Path | None) -> Iterator[None]:
    """Run py-spy on the server's root while the block runs."""
    if path is None:
        yield
        return
    # Samples only threads that hold the GIL; otherwise a waiting thread would be counted as a busy one.
    command = [
        "py-spy",
        "record",
        "--gil",
        "--pid",
        str(server.root.pid),
        "--format",
        "raw",
        "--output",
        str(path),
    ]
    with subprocess.Popen(
        [*command, "--rate", "200", "--duration", "3600"], stderr=subprocess.DEVNULL
    ) as spy:
        try:
            yield
        finally:
            spy.send_signal(2)
            spy.wait(60)


@contextmanager
def alone(server: Server, servers: Sequence[Server]) -> Iterator[None]:
    """Suspend all other servers but the one's worker."""
    with ExitStack() as stack:
        for other in servers:
            if other not in (server, server.worker):
                stack.enter_context(other.suspended())
        yield


async def sink(request: web.Request) -> web.Response:
    """Discard spans."""
    await request.read()
    return web.Response()


async def measure(
    servers: Sequence[Server],
    levels: Sequence[int],
    rounds: int,
    requests: int,
    tokens: int,
    profile: Path | None,
) -> dict[tuple[str, int], list[Run]]:
    """Run all rounds."""
    runs: dict[tuple[str, int], list[Run]] = {}
    for server in servers:
        with alone(server, servers):
            await drive(server, questions(max(levels), "warm"), max(levels), tokens)
    for number in range(rounds):
        for server in servers[:: 1 if number % 2 == 0 else -1]:
            with alone(server, servers):
                for level in levels:
                    asked = questions(max(requests, 3 * level), f"{number}/{level}")
                    runs.setdefault((server.name, level), []).append(
                        await drive(server, asked, level, tokens)
                    )
    if profile is not None:
        for server in servers:
            with alone(server, servers), profiled(server, profile / f"{server.name}.txt"):
                await drive(server, questions(requests * 10, "profile"), min(32, max(levels)), tokens)
    return runs


def main(
    model: Annotated[str, typer.Option(help="The model's folder.")] = str(REPOSITORY / "models" / "demo"),
    concurrency: Annotated[str, typer.Option(help="Callers at a time.")] = "1,8,32,64",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=1, help="At least so many a run, three for each caller.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Length of every answer.")] = 64,
    api_servers: Annotated[int, typer.Option(min=1, help="Beside these two, vLLM with so many.")] = 1,
    rust: Annotated[
        bool, typer.Option("--rust", help="Beside these two, vLLM's HTTP layer in Rust.")
    ] = False,
    gateways: Annotated[
        bool,
        typer.Option(
            "--in-front", help="Beside these two, Sluice and a bare proxy in front of vLLM's server."
        ),
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Folder for py-spy's stacks of both API processes.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go too.")] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="An 8B shape, random weights in bfloat16, on a GPU."),
    ] = False,
) -> None:
    """Compare the servers, and print a table."""
    levels = [int(part) for part in concurrency.split(",")]
    console = Console(width=150)

    async def run(flags: Flags) -> tuple[dict[tuple[str, int], list[Run]], dict[str, int]]:
        app = web.Application()
        app.router.add_post("/{path:.*}", sink)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers = [sluice(flags, folder, f"http://127.0.0.1:{port}"), vllm(flags, folder)]
            if api_servers > 1:
                servers.append(vllm(flags, folder, api_servers))
            if rust:
                servers.append(vllm(flags, folder, rust=True))
            for server in servers:
                stack.callback(server.close)
            for server in servers:
                await server.wait_ready("/ready" if server is servers[0] else "/health")
            if gateways:
                for name, ready in ((Name.SLUICE, "/ready"), (Name.FASTAPI, "/v1/models")):
                    servers.append(in_front(name, servers[1], folder))
                    stack.callback(servers[-1].close)
                    await servers[-1].wait_ready(ready)
            if profile is not None:
                profile.mkdir(parents=True, exist_ok=True)
            runs = await measure(servers, levels, rounds, requests, tokens, profile)
            memory = {server.name: round(server.rss_mib()) for server in servers}
        await runner.cleanup()
        return runs, memory

    with tempfile.TemporaryDirectory() as made:
        flags = Flags(model)
        if gpu:
            flags = Flags(
                str(shape_of_8b(Path(made))),
                dtype="bfloat16",
                block_size=16,
                kv_cache_bytes=6 << 30,
                load_format="dummy",
                gpu_memory_utilization=0.3,
            )
        runs, memory = asyncio.run(run(flags))
    rows = {key: summarize(each) for key, each in runs.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    console.print(
        f"{machine}; {rounds} rounds, at least {requests} requests of {tokens} tokens a run; {flags}"
    )
    show(console, rows, levels)
    console.print(f"resident memory of the API process, MiB: {memory}")
    if json_file is not None:
        named = {f"{name}/{level}": row for (name, level), row in rows.items()}
        json_file.write_text(json.dumps({"flags": asdict(flags), "rows": named, "rss_mib": memory}, indent=1))


if __name__ == "__main__":
    typer.run(main)
