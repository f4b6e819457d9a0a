"""A worker process is kept running, given up when it never lives, and stopped with what it started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from gateway.config import Settings
from gateway.gpus import worker as module
from gateway.gpus.crew import Crew
from gateway.gpus.layout import Seat
from gateway.gpus.worker import MOST_SHORT_LIVES, GivenUp, GpuWorker

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
ENDS = [sys.executable, "-c", "raise SystemExit(3)"]


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is waited for is a process
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", (0.01,))


def make(command: list[str]) -> GpuWorker:
    return GpuWorker(Seat("0", 1), command, os.environ, clock=time.monotonic)


async def test_a_worker_that_is_killed_is_started_again() -> None:
    worker = make(SLEEPS)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run())
        await until(lambda: worker.pid is not None)
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: worker.pid not in (None, first))
        assert worker.restarts == 1
        second = worker.pid
        running.cancel()
    assert second is not None
    assert not psutil.pid_exists(second), "stopped with its keeper"


async def test_one_that_never_lives_is_given_up() -> None:
    worker = make(ENDS)
    with pytest.raises(GivenUp, match=f"ended {MOST_SHORT_LIVES} times at once"):
        await worker.run()
    assert worker.restarts == MOST_SHORT_LIVES - 1


async def test_the_front_ends_when_no_worker_is_left() -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with Crew(Settings(), [make(ENDS), make(ENDS)]).running():
            await asyncio.sleep(60)
    assert ended.group_contains(GivenUp, match="no worker is left")


async def test_one_worker_that_is_left_is_enough() -> None:
    lives, ends = make(SLEEPS), make(ENDS)
    async with Crew(Settings(), [lives, ends]).running():
        await until(lambda: ends.restarts == MOST_SHORT_LIVES - 1)
        await asyncio.sleep(0.1)
        assert lives.pid is not None
    assert lives.pid is None
