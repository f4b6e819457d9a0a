"""Thousands of faulty Bedrock calls: each ends in time with an outcome of the closed set, and leaks nothing.

Every call goes through the real backend (boto3, its threads, its lanes) to a stand-in in a process of its
own. The stand-in checks the request with botocore's model of the service and then misbehaves: it throttles,
fails, denies, hangs before or within its answer, cuts, closes too early or sends garbage. Some callers have a
deadline shorter than Bedrock's own timeout and disconnect.

::

    python -m benchmarks.chaos.bedrock_faults --calls 10000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from budgeting.values import Message, Role
from gateway.backends.bedrock.backend import BedrockBackend
from gateway.backends.port import Work
from gateway.config.backends import BedrockSection
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from gateway.wiring.bedrock import make_bedrock
from observability.logs import configure_logging
from ops.chaos.processes import Process
from ops.chaos.testbed import BEDROCK_MODEL, BEDROCK_MODULE, CREDENTIALS
from ops.free_ports import free_ports
from resilience.failures import BackendFailure, FailureKind

FAULTS: dict[str, dict[str, Any]] = {
    "throttled": {"status": 429, "error": "ThrottlingException"},
    "internal error": {"status": 500, "error": "InternalServerException"},
    "unavailable": {"status": 503, "error": "ServiceUnavailableException"},
    "access denied": {"status": 403, "error": "AccessDeniedException"},
    "hangs before its answer": {"hang_before": True},
    "hangs within it": {"fault": "hang"},
    "cut": {"fault": "cut"},
    "closed too early": {"fault": "close"},
    "an exception within": {"fault": "exception", "error": "throttlingException"},
    "garbage": {"fault": "garbage"},
    "answers": {},
}
# Calls in flight at once, as many as the backend has lanes by default.
AT_ONCE = 32
# Longest tolerated silence of Bedrock, and the deadline of the callers that have one, in seconds.
READ_TIMEOUT_S = 0.6
DEADLINE_S = 0.3
TOTAL_TIMEOUT_S = 3.0
# Share of the callers that have the deadline.
WITH_DEADLINE = 0.3
# How much later than its bound a call may end on a machine that does nothing else, seconds.
GRACE_S = 1.0
# The calls are made in this many parts; memory is read after each.
PARTS = 10
START_WITHIN_S = 60.0
LEFT_WITHIN_S = 30.0
POLL_S = 0.02


@dataclass(slots=True)
class Figures:
    """The figures of all calls.

    Args:
        ends: how often each fault ended in which way.
        took_s: how long each call took.
        late: calls that ended later than their bound allows.
        early: calls reported as timed out although Bedrock was silent for less than the read timeout.
        rss_mib: resident memory after each part of the calls.
        threads: threads before and after, without those of the lanes.
        lane_threads: threads of the lanes at the end; there are never more than lanes.
        left: tasks, threads of calls, lanes and connections that were left at the end, by name.
    """

    calls: int = 0
    wall_s: float = 0.0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    late: int = 0
    early: int = 0
    rss_mib: list[float] = field(default_factory=list)
    threads: tuple[int, int] = (0, 0)
    lane_threads: int = 0
    descriptors: tuple[int, int] = (0, 0)
    left: dict[str, int] = field(default_factory=dict)


async def measure(
    calls: int, folder: Path, *, seed: int = 0, parts: int = PARTS, grace_s: float = GRACE_S
) -> Figures:
    """Make ``calls`` calls; the environment must hold AWS credentials.

    Args:
        calls: how many.
        folder: where the stand-in's log goes.
        seed: of the faults, and of which callers have a deadline.
        parts: number of parts; after each, all calls are waited for and memory is read.
        grace_s: how much later than its bound a call may end before it counts as late.
    """
    port, control = free_ports(2)
    words = ("--port", str(port), "--control-port", str(control))
    stand_in = Process("bedrock", (sys.executable, "-m", BEDROCK_MODULE, *words), folder, dict(os.environ))
    await stand_in.start(START_WITHIN_S)
    try:
        section = BedrockSection.model_validate(
            {
                "kind": "bedrock", "model_id": BEDROCK_MODEL, "region": "us-east-1",
                "endpoint_url": f"http://127.0.0.1:{port}", "max_concurrency": AT_ONCE,
                "read_timeout_seconds": READ_TIMEOUT_S, "total_timeout_seconds": TOTAL_TIMEOUT_S,
                "region_cooldown_seconds": 0,
            }
        )  # fmt: skip
        backend = make_bedrock("bedrock", section, clock=time.monotonic)
        try:
            chance = random.Random(seed)
            return await _calls(backend, calls, f"http://127.0.0.1:{control}/", chance, parts, grace_s)
        finally:
            backend.stop()
    finally:
        await stand_in.end()


async def _calls(
    backend: BedrockBackend, calls: int, control: str, chance: random.Random, parts: int, grace_s: float
) -> Figures:
    figures, here = Figures(calls), psutil.Process()
    # Before anything is counted, boto3 is loaded and the executor that asks the stand-in has its thread.
    await _batch(backend, ["answers"] * AT_ONCE, chance, Figures(), grace_s)
    await asyncio.to_thread(_stand_in_state, control)
    tasks = len(asyncio.all_tasks())
    before = (_threads(lanes=False), here.num_fds())
    began = time.monotonic()
    part = max(1, calls // parts)
    made = 0
    while made < calls:
        size = min(part, calls - made)
        names = [chance.choice(list(FAULTS)) for _ in range(size)]
        await _batch(backend, names, chance, figures, grace_s)
        made += size
        gc.collect()
        figures.rss_mib.append(here.memory_info().rss / 2**20)
    figures.wall_s = time.monotonic() - began

    async def left() -> dict[str, int]:
        return {
            "tasks": len(asyncio.all_tasks()) - tasks,
            "lanes": backend.load.running + backend.load.waiting,
            "calls at the stand-in": (await asyncio.to_thread(_stand_in_state, control))["active"],
        }

    # The lane of an abandoned call ends with the socket's own timeout; the stand-in notices that later.
    figures.left = await left()
    for _ in range(int(LEFT_WITHIN_S / POLL_S)):
        if not any(figures.left.values()):
            break
        await asyncio.sleep(POLL_S)
        figures.left = await left()
    figures.threads = (before[0], _threads(lanes=False))
    figures.lane_threads = _threads(lanes=True)
    figures.descriptors = (before[1], here.num_fds())
    return figures


def _threads(*, lanes: bool) -> int:
    """Return the number of threads of this process: those of the lanes, or all others."""
    return sum(thread.name.startswith("bedrock-") is lanes for thread in threading.enumerate())


async def _batch(
    backend: BedrockBackend, names: Sequence[str], chance: random.Random, figures: Figures, grace_s: float
) -> None:
    """Make one call for each name."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(fault: str, deadline_s: float | None) -> None:
        async with free:
            began = time.monotonic()
            end = await _call(backend, FAULTS[fault], deadline_s)
            took_s = time.monotonic() - began
            figures.ends[fault, end] += 1
            figures.took_s.append(took_s)
            bound_s = deadline_s if deadline_s is not None else TOTAL_TIMEOUT_S
            figures.late += took_s > bound_s + grace_s
            figures.early += end.startswith(FailureKind.TIMEOUT.value) and took_s < READ_TIMEOUT_S

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(one(name, DEADLINE_S if chance.random() < WITH_DEADLINE else None))


async def _call(backend: BedrockBackend, fault: Mapping[str, Any], deadline_s: float | None) -> str:
    pieces = 0

    async def out(delta: Delta) -> None:
        nonlocal pieces
        pieces += bool(delta.text)

    text = json.dumps({"delay_s": 0.0, **fault})
    work = Work("gen", (1, 2, 3), (Message(Role.USER, text),), Sampling(max_tokens=64))
    try:
        async with asyncio.timeout(deadline_s):
            await backend.generate(work, out)
    except BackendFailure as failure:
        return f"{failure.kind.value}{' after text' if pieces else ''}"
    except TimeoutError:
        return "the caller's deadline"
    return "whole"


def _stand_in_state(control: str) -> Any:
    with urllib.request.urlopen(control, timeout=10) as answer:
        return json.loads(answer.read())


def shown(figures: Figures) -> str:
    """The figures as Markdown."""
    took = sorted(figures.took_s)
    ends: dict[str, list[str]] = {}
    for (fault, end), count in sorted(figures.ends.items(), key=lambda one: -one[1]):
        ends.setdefault(fault, []).append(f"{end} {count:,}")
    lines = ["| the stand-in | ended as |", "| --- | --- |"]
    lines += [f"| {fault} | {', '.join(endings)} |" for fault, endings in sorted(ends.items())]
    rss = figures.rss_mib
    lines += [
        "",
        f"{figures.calls:,} calls in {figures.wall_s:,.0f} s, {AT_ONCE} at once; "
        f"p50 {_at(took, 0.5):.3f} s, p99 {_at(took, 0.99):.3f} s, longest {took[-1]:.3f} s; "
        f"later than their bound: {figures.late}, timed out too early: {figures.early}.",
        f"Threads before and after: {figures.threads[0]}, {figures.threads[1]}, "
        f"and {figures.lane_threads} of the lanes; "
        f"descriptors: {figures.descriptors[0]}, {figures.descriptors[1]}; left: "
        + ", ".join(f"{name} {count}" for name, count in figures.left.items())
        + ".",
        "Resident MiB after each part: " + ", ".join(f"{value:.1f}" for value in rss) + ".",
    ]
    return "\n".join(lines)


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Faulty calls of Bedrock, and what is left of them.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(CREDENTIALS)
    logs = configure_logging("error", json=False)
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
            figures = asyncio.run(measure(given.calls, Path(folder), seed=given.seed))
    finally:
        logs.close()
    print(shown(figures))
    raise SystemExit(1 if figures.late or figures.early or any(figures.left.values()) else 0)


if __name__ == "__main__":
    main()
