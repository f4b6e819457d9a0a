"""The gateway process and the load of ``benchmarks.admission_live``."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import yaml

from benchmarks.admission_gateway import TENANT_KEY
from evaluation.simulator.values import Arrival, SimulatedRequest
from observability.metrics_text import samples_of
from ops.replay.calibrate import calibrate
from ops.replay.contract import OpenAI
from ops.replay.load import ReplayRun, run_load
from ops.replay.outcome import ReplayedRequest
from ops.replay.shape import Planned
from ops.replay.target import NO_FALLBACK, ReplayTarget
from ops.replay.text import TextMaker

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "models" / "demo"
TENANTS = 6
# Forbids the end token, so that every answer has the length that the trace gives.
NO_END = {"2": -100}
START_TIMEOUT_S, STOP_TIMEOUT_S = 400.0, 30.0
ADMIN_KEY = "benchmark-key-0123456789abcdef0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine's settings in this benchmark."""

    kind: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    env: tuple[tuple[str, str], ...] = ()


# KV pools that hold about one batch: without admission they are full under overload.
MACHINES = {
    "embedded": Machine("embedded", 16, 400, 16, 256, (("SLUICE_ENGINE__NUM_THREADS", "1"),)),
    "vllm": Machine("vllm", 32, 200, 16, 256, (("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1"))),
}


class PrioritizedChat(OpenAI):
    """Chat completions of an exact answer length, with a priority."""

    def __init__(self, model: str, priority: int) -> None:
        super().__init__(model)
        self._priority = priority

    def body(self, text: str, max_tokens: int) -> dict[str, object]:
        """Return the request's body with one user turn."""
        more = {"priority": self._priority, "temperature": 0.0, "logit_bias": NO_END}
        return {**super().body(text, max_tokens), **more}


# The gateway


@contextmanager
def gateway(machine: Machine, folder: Path, route: Mapping[str, object], *, is_open: bool) -> Iterator[str]:
    """Start a gateway process, and return its address once it is ready."""
    routing = folder / "routing.yaml"
    routing.write_text(yaml.safe_dump({"routes": {"self_hosted_generation": dict(route)}}), encoding="utf-8")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")},
        "SLUICE_ADMIN_KEY": ADMIN_KEY,
        "SLUICE_SERVER__PORT": "0",
        "SLUICE_ENGINE__KIND": machine.kind,
        "SLUICE_ENGINE__MODEL": str(MODEL),
        "SLUICE_ENGINE__DTYPE": "float32",
        "SLUICE_ENGINE__MAX_MODEL_LEN": "1024",
        "SLUICE_ENGINE__BLOCK_SIZE": str(machine.block_size),
        "SLUICE_ENGINE__NUM_BLOCKS": str(machine.num_blocks),
        "SLUICE_ENGINE__MAX_NUM_SEQS": str(machine.max_num_seqs),
        "SLUICE_ENGINE__MAX_NUM_BATCHED_TOKENS": str(machine.max_num_batched_tokens),
        "SLUICE_ENGINE__MAX_LORAS": "0",
        "SLUICE_ROUTING__FILE": str(routing),
        "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
        **dict(machine.env),
    }
    command = [sys.executable, "-m", "benchmarks.admission_gateway"]
    command += [*(["--open"] if is_open else []), "sluice.yaml"]
    log = folder / "gateway.log"
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        found = re.search(r"http://\S+", process.stdout.readline() if process.stdout else "")
        if found is None:
            raise RuntimeError(f"the gateway did not start: {log.read_text(encoding='utf-8')[-2000:]}")
        _wait_ready(found[0], process, log)
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # the gateway does not listen yet
        time.sleep(0.1)
    raise RuntimeError(f"the gateway was not ready: {log.read_text(encoding='utf-8')[-2000:]}")


def metric(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """A metric's labels and values."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return [(dict(sample.labels), sample.value) for sample in samples_of(text, name)]


def total(url: str, name: str) -> float:
    """A metric's sum over its labels."""
    return sum(value for _, value in metric(url, name))


# Load


@dataclass(frozen=True, slots=True)
class Caller:
    """Sends each request with the key of its tenant."""

    targets: Mapping[str, ReplayTarget]
    contracts: Mapping[int, PrioritizedChat]
    text: TextMaker

    async def send(self, arrival: Arrival, prompt: str, started_at: float) -> ReplayedRequest:
        """Send one request now."""
        planned = planned_of(arrival)
        target, contract = self.targets[arrival.tenant], self.contracts[arrival.priority]
        return await target.generate(contract, planned, prompt, started_at=started_at)


def planned_of(arrival: Arrival) -> Planned:
    """Return the request in the load generator's form."""
    return Planned(arrival.number, arrival.at, arrival.prompt, arrival.output)


async def caller(url: str, stack: AsyncExitStack) -> Caller:
    """Return a caller whose prompts have exact lengths in the model's tokens."""
    targets = {}
    for number in range(1, TENANTS + 1):
        target = ReplayTarget(
            url, key=f"{TENANT_KEY}{number}", timeout_s=600.0, headers=NO_FALLBACK, clock=time.monotonic
        )
        targets[f"t{number}"] = await stack.enter_async_context(target)
    first = targets["t1"]
    model = await first.first_model()
    contracts = {rank: PrioritizedChat(model, rank) for rank in (-1, 0, 1)}
    lexicon, _ = await calibrate(first, contracts[0])
    return Caller(targets, contracts, TextMaker(lexicon, seed=1))


async def closed_loop(
    one: Caller, requests: Iterator[Arrival], callers: int, seconds: float
) -> list[ReplayedRequest]:
    """Let ``callers`` send one request at a time each; requests begun within ``seconds`` are finished."""
    begun = time.monotonic()
    done: list[ReplayedRequest] = []

    async def ask() -> None:
        while time.monotonic() < begun + seconds:
            arrival = replace(next(requests), priority=0)
            prompt = one.text.prompt(planned_of(arrival))
            done.append(await one.send(arrival, prompt, begun))

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(ask())
    return [outcome for outcome in done if outcome.ok]


async def open_loop(one: Caller, requests: Sequence[Arrival], grace_s: float) -> list[SimulatedRequest]:
    """Send each request at its time; unanswered ones are aborted ``grace_s`` after the last arrival."""
    stop, run = asyncio.Event(), ReplayRun()
    by_number = {arrival.number: arrival for arrival in requests}

    async def end() -> None:
        await asyncio.sleep(requests[-1].at + grace_s)
        stop.set()

    async with asyncio.TaskGroup() as group:
        ending = group.create_task(end())
        await run_load(
            (planned_of(arrival) for arrival in requests),
            text=one.text.prompt,
            send=lambda planned, prompt, at: one.send(by_number[planned.index], prompt, at),
            concurrency=len(requests),
            clock=time.monotonic,
            stop=stop,
            run=run,
        )
        ending.cancel()
    replayed = {outcome.index: outcome for outcome in run.outcomes}
    return [simulated_of(arrival, replayed.get(arrival.number)) for arrival in requests]


def simulated_of(arrival: Arrival, outcome: ReplayedRequest | None) -> SimulatedRequest:
    """Return a live request's outcome in the simulator's form; times count from when the request was due."""
    request = SimulatedRequest(arrival)
    if outcome is None:
        return request
    if not outcome.ok:
        request.refused_at, request.reason = outcome.done_s, outcome.code
    elif outcome.ttft_s is not None and outcome.last_token_s is not None:
        request.first_token_at = outcome.sent_s + outcome.ttft_s
        request.finished_at = outcome.sent_s + outcome.last_token_s
        request.produced = outcome.output_tokens
        request.cached = outcome.cached_tokens
        request.computed = outcome.input_tokens - outcome.cached_tokens + outcome.output_tokens
    return request
