"""The load generator, a process of its own: a job on standard input, its result on standard output, JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import psutil
import uvloop

from benchmarks.forwarding.loops import ClosedLoop, Job, OpenLoop, Result, Shape
from benchmarks.forwarding.workload import Regime

# How long, in seconds, the load generator waits at the end for answers in flight.
PATIENCE_S = 20.0


class ProcessTree:
    """CPU and memory of a process and its descendants; zero for ``None``."""

    def __init__(self, pid: int | None) -> None:
        roots = [] if pid is None else [psutil.Process(pid)]
        self._processes = [*roots, *(child for root in roots for child in root.children(recursive=True))]

    def cpu_s(self) -> float:
        """User and system time so far, of all threads, in nanoseconds' resolution (psutil has hundredths)."""
        # Linux's number of a process' CPU clock.
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self._processes)

    def rss_bytes(self) -> int:
        """Return the resident bytes of all processes together."""
        return sum(process.memory_info().rss for process in self._processes)


async def run(job: Job, *, patience_s: float = PATIENCE_S) -> Result:
    """Warm up, measure, then wait for the answers in flight."""
    result = Result()
    tree = ProcessTree(job.pid)
    async with asyncio.TaskGroup() as tasks:
        loop = (ClosedLoop if job.shape is Shape.CLOSED else OpenLoop)(job, result, tasks)
        await asyncio.sleep(job.warm_up_s + job.stagger_s)
        cpu_s, own_cpu_s, began_at = tree.cpu_s(), time.process_time(), time.perf_counter()
        loop.caller.counting = True
        await asyncio.sleep(job.seconds)
        loop.caller.counting = False
        result.elapsed_s = time.perf_counter() - began_at
        result.cpu_s = tree.cpu_s() - cpu_s
        result.own_cpu_s = time.process_time() - own_cpu_s
        loop.stop()
        await loop.caller.drain(patience_s)
    result.rss_bytes = tree.rss_bytes()
    return result


def job_from(value: dict[str, Any]) -> Job:
    """Return the job of a JSON object."""
    return replace(Job(**value), shape=Shape(value["shape"]), regime=Regime(value["regime"]))


def main() -> None:
    """Run the job from standard input."""
    # The process lives for seconds; a garbage collection would show in the p99.
    gc.disable()
    json.dump(asdict(uvloop.run(run(job_from(json.load(sys.stdin))))), sys.stdout)


if __name__ == "__main__":
    main()
