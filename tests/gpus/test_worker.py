"""A worker process is kept running, given up when it always ends at once, and stopped with its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from gateway.config.settings import Settings
from ops.gpus import worker as module
from ops.gpus.layout import WorkerPlacement
from ops.gpus.worker import MAX_SHORT_RUNS, MOST_SILENT, GivenUp, GpuWorker, Ping, answers
from ops.gpus.worker_group import WorkerGroup

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
ENDS = [sys.executable, "-c", "raise SystemExit(3)"]
FRONT = f"""
import asyncio, os, time
from ops.gpus.layout import WorkerPlacement
from ops.gpus.worker import GpuWorker

async def main():
    worker = GpuWorker(WorkerPlacement(None, 1), {SLEEPS!r}, os.environ, clock=time.monotonic)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        while worker.process is None:
            await asyncio.sleep(0.01)
        print("pid", worker.process.pid, flush=True)

asyncio.run(main())
"""


async def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is waited for is a process
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", (0.01,))
    monkeypatch.setattr(module, "PING_EVERY_S", 0.01)


async def silent(port: int, timeout_s: float) -> bool:
    return False


def make(command: list[str], ping: Ping = silent) -> GpuWorker:
    return GpuWorker(WorkerPlacement("0", 1), command, os.environ, clock=time.monotonic, ping=ping)


async def test_a_worker_that_is_killed_is_started_again() -> None:
    worker = make(SLEEPS)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run())
        await until(lambda: worker.process is not None)
        first = worker.process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: worker.process is not first)
        assert worker.restarts == 1
        second = worker.process
        running.cancel()
    assert second is not None
    assert not psutil.pid_exists(second.pid), "stopped with its keeper"


async def test_a_worker_that_answered_and_no_longer_does_is_killed_and_started_again() -> None:
    pings: list[bool] = []

    async def ping(port: int, timeout_s: float) -> bool:
        pings.append(worker.restarts == 0 and len(pings) < 3)
        return pings[-1]

    worker = make(SLEEPS, ping)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run())
        await until(lambda: worker.restarts == 1)
        assert pings[: 3 + MOST_SILENT] == [True] * 3 + [False] * MOST_SILENT
        await until(lambda: len(pings) > 3 + 3 * MOST_SILENT)
        assert worker.restarts == 1, "who has not answered yet is still starting"
        running.cancel()


@contextlib.asynccontextmanager
async def saying(words: bytes) -> AsyncIterator[int]:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(words)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_only_a_worker_that_answers_200_is_alive() -> None:
    async with saying(b"HTTP/1.1 200 OK\r\n\r\n") as port:
        assert await answers(port, 20.0)
    assert not await answers(port, 20.0), "nobody listens there any more"
    async with saying(b"HTTP/1.1 503 Service Unavailable\r\n\r\n") as port:
        assert not await answers(port, 20.0)
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        assert not await answers(frozen.getsockname()[1], 0.2), "it takes the connection and says nothing"


async def test_a_worker_that_always_ends_at_once_is_given_up() -> None:
    worker = make(ENDS)
    message = rf"worker 0 \(GPU 0\) ended {MAX_SHORT_RUNS} times at once, last with exit code 3"
    with pytest.raises(GivenUp, match=message):
        await worker.run()
    assert worker.restarts == MAX_SHORT_RUNS - 1


async def test_the_front_ends_when_no_worker_is_left() -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with WorkerGroup(Settings(), [make(ENDS), make(ENDS)]).running():
            await asyncio.sleep(250)
    assert ended.group_contains(GivenUp, match="no worker is left")


@pytest.mark.parametrize("command", [ENDS, ["/no/such/program"]], ids=["ends", "does not start"])
async def test_the_front_goes_on_while_one_worker_is_left(command: list[str]) -> None:
    lives, ends = make(SLEEPS), make(command)
    async with WorkerGroup(Settings(), [lives, ends]).running():
        await until(lambda: ends.restarts == MAX_SHORT_RUNS - 1)
        await asyncio.sleep(0.1)
        assert lives.process is not None
        assert lives.process.returncode is None
    assert lives.process.returncode is not None


def gone(process: psutil.Process) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's way of telling children is Linux'")
def test_a_front_that_is_killed_takes_its_workers_with_it_even_one_that_stands_still() -> None:
    with subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        line = next(line for line in front.stdout if line.startswith("pid "))
        worker = psutil.Process(int(line.split()[1]))
        worker.suspend()
        front.kill()
    deadline = time.monotonic() + 30
    while not gone(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(worker)
