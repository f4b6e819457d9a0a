"""Runs all workers of a machine while the gateway in front of them serves."""

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import yaml

from engine.own_modules import with_own_modules
from gateway.config.engine import ENGINE_ENV
from gateway.config.settings import ENV_PREFIX, FRONT_KEY, Settings
from ops.free_ports import free_ports
from ops.gpus import layout
from ops.gpus.worker import GivenUp, GpuWorker


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers, and the configuration of the gateway in front of them."""

    front: Settings
    workers: Sequence[GpuWorker]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep all workers running while the block runs, then stop them.

        Raises ExceptionGroup with GivenUp when no worker is left.
        """
        async with asyncio.TaskGroup() as tasks:
            alive = [tasks.create_task(self._keep(worker)) for worker in self.workers]
            watch = tasks.create_task(self._all_given_up(alive))
            yield
            watch.cancel()
            for task in alive:
                task.cancel()

    async def _keep(self, worker: GpuWorker) -> GivenUp | None:
        try:
            await worker.run()
        except GivenUp as lost:
            return lost
        return None

    async def _all_given_up(self, workers: Sequence[asyncio.Task[GivenUp | None]]) -> None:
        await asyncio.wait(workers)
        reported = [str(lost) for worker in workers if (lost := worker.result()) is not None]
        raise GivenUp(f"no worker is left: {'; '.join(reported)}")


@contextlib.contextmanager
def make_worker_group(
    settings: Settings, devices: Sequence[str | None], log_level: str
) -> Iterator[WorkerGroup]:
    """Prepare a worker for each of ``devices``; its files are removed when the block ends.

    The key that the front gateway uses for the workers is random and only in the environment.

    Raises ConfigError: the configuration has no engine to run.
    """
    placements = list(map(layout.WorkerPlacement, devices, free_ports(len(devices)), count()))
    key = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="sluice-gpus-") as folder:
        routing = Path(folder) / "routing.yaml"
        routing.write_text(yaml.safe_dump(layout.WORKER_ROUTING), encoding="utf-8")
        workers = []
        for placement in placements:
            config = Path(folder) / f"worker-{placement.number}.yaml"
            worker = layout.worker_of(settings, placement, routing)
            config.write_text(yaml.safe_dump(worker), encoding="utf-8")
            environ = with_own_modules(worker_environ(os.environ, placement, key))
            words = ("ops.cli", "serve", "--config", str(config), "--log-level", log_level)
            command = (sys.executable, "-m", *words)
            workers.append(GpuWorker(placement, command, environ, clock=time.monotonic))
        front = layout.front_of(settings, placements)
        os.environ[layout.KEY_VARIABLE] = key  # the front's pool reads its key from there, like any pool
        try:
            yield WorkerGroup(front, workers)
        finally:
            del os.environ[layout.KEY_VARIABLE]


def worker_environ(environ: Mapping[str, str], placement: layout.WorkerPlacement, key: str) -> dict[str, str]:
    """The worker's environment: this process's, without overrides of the configuration, which its file has.

    The worker accepts only the front gateway's key.
    """
    environ = {
        name: value
        for name, value in environ.items()
        if not (name.startswith(ENV_PREFIX) and "__" in name)
        and name not in ENGINE_ENV
        and name != "SLUICE_ADMIN_KEY"
    }
    environ[FRONT_KEY] = key
    environ[layout.NUMBER_VARIABLE] = str(placement.number)
    if placement.devices is not None:
        environ[layout.DEVICE_VARIABLE] = placement.devices
    return environ
