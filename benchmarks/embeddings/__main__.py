"""The command of the benchmark: ``python -m benchmarks.embeddings --help``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.embeddings.load import VectorJob, VectorResult
from benchmarks.embeddings.worker import MODEL
from benchmarks.forwarding.gateways import KEY, REPOSITORY, python_module
from benchmarks.forwarding.loops import Job, Shape
from benchmarks.forwarding.processes import Broken, Cores, ask, free_port, run_load, started, wait_until_ready
from benchmarks.forwarding.workload import MODEL as CHAT_MODEL
from benchmarks.forwarding.workload import Regime

START_TIMEOUT_S = 400.0
"""vLLM compiles for minutes on a busy machine."""
WARM_UP_S = 1.0
CHATS_PER_S = 20
IN_MEMORY = "/dev/shm"
"""Folder of the ledger and its journal: how long a disk takes to sync is no figure of the gateway."""
STEP_MS = 10.0
"""Milliseconds between two tokens of a chat."""
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Site:
    """The ports of the running processes, and the gateway's process id."""

    cores: Cores
    gateway: int
    bare: int
    vectors: int
    pid: int


@app.command()
def main(
    worker: Annotated[str, typer.Option(help="scripted, or vllm: its CPU build with --model.")] = "scripted",
    model: Annotated[str, typer.Option(help="For --worker vllm: a folder.")] = "models/demo",
    delay_ms: Annotated[float, typer.Option(help="For --worker scripted: how long a request takes.")] = 20.0,
    dimensions: Annotated[int, typer.Option(help="For --worker scripted: of a vector.")] = 1_024,
    callers: Annotated[
        list[int] | None, typer.Option(help="Callers at a time, repeatable; 1, 8, 64.")
    ] = None,
    texts: Annotated[list[int] | None, typer.Option(help="Texts of a request, repeatable; 1 and 16.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each side has one turn in each.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long each load is measured.")] = 4.0,
    chats: Annotated[
        bool, typer.Option("--chats/--no-chats", help="Also chats beside a full load of vectors.")
    ] = True,
    realtime: Annotated[
        bool, typer.Option("--realtime", help="Its processes go before all others (chrt, root).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Embedding requests per second through the gateway and to the worker alone; chats during that load.

    A minimal Python gateway, ``benchmarks.forwarding.proxy`` ("bare"), is measured too. Both gateways run on
    a core of their own; worker and load generator share another. The sides take turns, and the first one
    alternates. Shown are medians over the rounds; a ratio is the median of the rounds' ratios. The ledger is
    in memory (/dev/shm): how long a disk takes to sync is no figure of the gateway.
    """
    console = Console()
    figures: dict[str, object] = {"worker": worker, "throughput": [], "chats": None}
    with tempfile.TemporaryDirectory(prefix="embeddings-", dir=IN_MEMORY) as folder, ExitStack() as held:
        start = [worker, model, str(delay_ms), str(dimensions)]
        site = held.enter_context(running(Path(folder), Cores.here(realtime=realtime), start))
        rows = [
            throughput(site, count, many, rounds, seconds)
            for count in texts or [1, 16]
            for many in callers or [1, 8, 64]
        ]
        figures["throughput"] = rows
        if chats:
            figures["chats"] = chat_times(site, rounds, seconds, (texts or [16])[-1])
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    console.print(table)
    if figures["chats"] is not None:
        console.print("chats' TTFT", figures["chats"])


@contextmanager
def running(folder: Path, cores: Cores, worker: Sequence[str]) -> Iterator[Site]:
    """Start a worker of embeddings, a worker of chats, and a gateway in front of both."""
    kind, model, delay_ms, dimensions = worker
    vectors, chat, bare, gateway = free_port(), free_port(), free_port(), free_port()
    (folder / "sluice.yaml").write_text(
        f"""
server: {{host: 127.0.0.1, port: {gateway}}}
engine: {{kind: none, model: models/demo, tokenizer: models/demo}}
backends:
  worker: {{kind: openai, base_urls: ["http://127.0.0.1:{chat}/v1"], model: {CHAT_MODEL}}}
  vectors: {{kind: openai, base_urls: ["http://127.0.0.1:{vectors}/v1"], model: {MODEL}}}
state: {{url: "sqlite:///{folder}/sluice.db"}}
ledger: {{url: "sqlite+aiosqlite:///{folder}/sluice.db"}}
admission: {{max_wait_ms: 600000}}
routing: {{file: {folder}/routing.yaml}}
"""
    )
    (folder / "routing.yaml").write_text("routes: {self_hosted_generation: {backends: [{name: worker}]}}")
    commands = {
        "vectors": (
            *cores.worker,
            *python_module("benchmarks.embeddings.worker", vectors, delay_ms, dimensions),
        ),
        "chats": (*cores.worker, *python_module("benchmarks.forwarding.worker", chat)),
        "bare": (*cores.gateway, *python_module("benchmarks.forwarding.proxy", bare, vectors)),
        "gateway": (*cores.gateway, *python_module("ops.cli", "serve", "--config", folder / "sluice.yaml")),
    }
    if kind == "vllm":
        options = [
            "--model",
            model,
            "--served-model-name",
            MODEL,
            "--runner",
            "pooling",
            "--dtype",
            "float32",
        ]
        options += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 28), "--block-size", "32"]
        options += ["--port", str(vectors), "--host", "127.0.0.1", "--disable-uvicorn-access-log"]
        server = python_module("vllm.entrypoints.openai.api_server", *options)
        commands["vectors"] = (*cores.worker, *server)
    ready = {
        "vectors": (vectors, "/health"),
        "chats": (chat, "/health"),
        "bare": (bare, "/v1/models"),
        "gateway": (gateway, "/ready"),
    }
    environment = {"SLUICE_ADMIN_KEY": KEY, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with ExitStack() as held:
        for name, command in commands.items():
            log = folder / f"{name}.log"
            process = held.enter_context(started(command, log, environment))
            wait_until_ready(process, *ready[name], log, START_TIMEOUT_S)
        ask(chat, "POST", "/control", {"step_ms": STEP_MS})
        yield Site(cores, gateway, bare, vectors, process.pid)


def throughput(site: Site, texts: int, callers: int, rounds: int, seconds: float) -> dict[str, float]:
    """Measure one row of the table: all sides in turn."""
    sides: dict[int, list[VectorResult]] = {site.vectors: [], site.bare: [], site.gateway: []}
    cpu_s, answers = 0.0, 0
    for number in range(rounds):
        for port in list(sides)[:: 1 if number % 2 == 0 else -1]:
            before = sum(psutil.Process(site.pid).cpu_times()[:2])
            done = loaded(site, VectorJob(port, MODEL, KEY, callers, texts, seconds, WARM_UP_S))
            sides[port].append(done)
            if port == site.gateway:
                # CPU of the whole turn, with its warm-up.
                cpu_s += sum(psutil.Process(site.pid).cpu_times()[:2]) - before
                answers += round(len(done.latencies_s) * (seconds + WARM_UP_S) / seconds)
    rates = [[len(one.latencies_s) / one.elapsed_s for one in side] for side in sides.values()]
    p50 = [median([s for one in side for s in one.latencies_s]) * 1000 for side in sides.values()]
    alone, *others = rates
    ratios = [median(mine / theirs for theirs, mine in zip(alone, side, strict=True)) for side in others]
    return {
        "texts": texts,
        "callers": callers,
        "alone_per_s": median(alone),
        "bare_per_s": median(rates[1]),
        "gateway_per_s": median(rates[2]),
        "bare_ratio": ratios[0],
        "ratio": ratios[1],
        "alone_p50_ms": p50[0],
        "bare_p50_ms": p50[1],
        "gateway_p50_ms": p50[2],
        "gateway_cpu_ms": cpu_s / answers * 1000,
    }


def chat_times(site: Site, rounds: int, seconds: float, texts: int) -> dict[str, float]:
    """Return the TTFT of chats alone and next to 64 callers of embeddings, measured in turn."""
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(rounds):
        for loaded_too in (False, True) if number % 2 == 0 else (True, False):
            with ExitStack() as held:
                if loaded_too:
                    job = VectorJob(site.gateway, MODEL, KEY, 64, texts, seconds + 2 * WARM_UP_S, WARM_UP_S)
                    held.enter_context(begun(site, job))
                chats = Job(
                    port=site.gateway, shape=Shape.OPEN, amount=CHATS_PER_S, seconds=seconds, key=KEY,
                    seed=str(number), warm_up_s=2 * WARM_UP_S, regime=Regime.CONVERSATION, stream=True,
                    stagger_s=0.0, pid=None,
                )  # fmt: skip
                found[loaded_too].append(sorted(run_load(chats, site.cores.load).first_ms))
    figures = {}
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        for side, label in ((False, "alone"), (True, "beside")):
            figures[f"{label}_{name}_ms"] = median(at(one, part) for one in found[side])
        pairs = zip(found[False], found[True], strict=True)
        figures[f"ratio_{name}"] = median(at(other, part) / at(one, part) for one, other in pairs)
    return figures


def at(values: Sequence[float], part: float) -> float:
    """A quantile of sorted values."""
    return values[min(len(values) - 1, int(part * len(values)))]


def loaded(site: Site, job: VectorJob) -> VectorResult:
    """Run the load generator once. Raises Broken."""
    done = subprocess.run(
        [*site.cores.load, *python_module("benchmarks.embeddings.load")],
        cwd=REPOSITORY, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Broken(f"the load generator failed:\n{done.stderr}")
    result = VectorResult(**json.loads(done.stdout))
    if result.faults:
        raise Broken(result.faults[0])
    return result


@contextmanager
def begun(site: Site, job: VectorJob) -> Iterator[None]:
    """Run the load while the block runs."""
    process = subprocess.Popen(
        [*site.cores.load, *python_module("benchmarks.embeddings.load")],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(job)))
        process.stdin.close()
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(app())
