"""The run: every gateway under every load in each round, in turn."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.forwarding.gateways import KEY, Name, Recipe, python_module, recipe, regime_of
from benchmarks.forwarding.loops import Job, Result, Shape
from benchmarks.forwarding.processes import (
    Broken,
    Cores,
    ask,
    free_port,
    run_load,
    started,
    wait_until_ready,
    written_port,
)
from benchmarks.forwarding.workload import ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class Load:
    """One load: what the load generator does, and how fast the worker's streams advance."""

    title: str
    shape: Shape
    amount: int
    stream: bool = False
    step_ms: float = 0.0

    @property
    def stagger_s(self) -> float:
        """Return the time over which a closed loop spreads the starts of its paced streams: one answer."""
        return self.step_ms / 1000 * ANSWER_TOKENS if self.shape is Shape.CLOSED else 0.0


# In the order in which they run: the first load also fills the gateway's caches.
LOADS: Final[Mapping[str, Load]] = {
    "closed": Load("64 in flight", Shape.CLOSED, 64),
    "slow": Load("50 requests/s", Shape.OPEN, 50),
    "fast": Load("200 requests/s", Shape.OPEN, 200),
    "streams": Load("10 streams/s", Shape.OPEN, 10, stream=True, step_ms=10),
    "paced": Load("64 streams, a token every 10 ms", Shape.CLOSED, 64, stream=True, step_ms=10),
    "flood": Load("64 streams, no pause between tokens", Shape.CLOSED, 64, stream=True),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run."""

    names: Sequence[Name]
    rounds: int
    seconds: float
    warm_up_s: float
    loads: Mapping[str, Load] = field(default_factory=lambda: LOADS)
    python: str = sys.executable  # runs Sluice and the bare proxy
    agents: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One gateway in one round: the result of each load by its key in :data:`LOADS`."""

    name: Name
    round: int
    results: Mapping[str, Result]


def run_all(plan: Plan, cores: Cores, progress: Callable[[str], None]) -> list[Turn]:
    """Run the plan; ``progress`` is called with each step that begins.

    Raises:
        Broken: the worker, a gateway or the load generator failed.
        NotAvailable: a gateway is not installed.
    """
    return [
        _turn(name, number, plan, cores, progress)
        for number in range(plan.rounds)
        # The order alternates, so that a drift of the machine's speed favours no gateway.
        for name in plan.names[:: 1 if number % 2 == 0 else -1]
    ]


def _turn(name: Name, number: int, plan: Plan, cores: Cores, progress: Callable[[str], None]) -> Turn:
    """Run all loads one after the other on a fresh worker and a fresh gateway."""
    with (
        tempfile.TemporaryDirectory(prefix="forwarding-") as place,
        _worker(Path(place), cores) as worker_port,
    ):
        with _gateway(name, Path(place), cores, worker_port, plan.python) as (how, port, pid):
            results = {}
            for key, load in plan.loads.items():
                progress(f"round {number + 1}: {name}, {load.title}")
                ask(worker_port, "POST", "/control", {"step_ms": load.step_ms})
                job = Job(
                    port=port, shape=load.shape, amount=load.amount, seconds=plan.seconds, key=KEY,
                    # The same arrival times for every gateway in a round.
                    seed=f"{number}/{key}", warm_up_s=plan.warm_up_s,
                    regime=regime_of(name, agents=plan.agents),
                    stream=load.stream, stagger_s=load.stagger_s, pid=pid, path=how.path, model=how.model,
                )  # fmt: skip
                results[key] = run_load(job, cores.load)
        trimmed = json.loads(ask(worker_port, "GET", "/control")[1])["trimmed"]
        if trimmed:
            raise Broken(f"{name} sent {trimmed} shortened prompts to the worker: its figures mean nothing")
    return Turn(name, number, results)


@contextmanager
def _worker(folder: Path, cores: Cores) -> Iterator[int]:
    log = folder / "worker.log"
    port = free_port()
    worker = python_module("benchmarks.forwarding.worker", port, "--tokenizer", "models/demo")
    command = (*cores.worker, *worker)
    with started(command, log) as process:
        wait_until_ready(process, port, "/health", log)
        yield port


@contextmanager
def _gateway(
    name: Name, folder: Path, cores: Cores, worker_port: int, python: str
) -> Iterator[tuple[Recipe, int, int | None]]:
    """Start the gateway; yield recipe, port and process id (no gateway: the worker's port, ``None``)."""
    if name is Name.DIRECT:
        yield Recipe((), None), worker_port, None
        return
    port, log = free_port(), folder / "gateway.log"
    how = recipe(name, folder=folder, port=port, worker_port=worker_port)
    command = [python if word == sys.executable else word for word in how.command]
    with started((*cores.gateway, *command), log, how.environment) as process:
        port = port if how.port_file is None else written_port(process, how.port_file, log)
        if how.ready_path is not None:
            wait_until_ready(process, port, how.ready_path, log)
        yield how, port, process.pid
