"""Supervises one worker process: restarts it when it ends or stops answering, stops it with its engine."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog

from engine.errors import EngineStartError
from ops.gpus.layout import WORKER_DRAIN_S, WorkerPlacement

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # waits before restarts, in seconds; the last one repeats
HEALTHY_S = 120.0  # a worker that ran this long, in seconds, was healthy: its failures count from zero again
MAX_SHORT_RUNS = 6  # consecutive short runs after which a worker is given up
STOP_S = WORKER_DRAIN_S + 25.0  # time for the drain, the engine's stop, and slack
# Liveness checks, with the times of deploy/k8s: period, timeout, and the consecutive failures that mean dead.
PING_EVERY_S, PING_TIMEOUT_S, MOST_SILENT = 10.0, 30.0, 3
PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PR_SET_PDEATHSIG = 1

# A function of port and timeout in seconds: whether the server on that port answers in time.
Ping = Callable[[int, float], Awaitable[bool]]


async def answers(port: int, timeout_s: float) -> bool:
    """Whether the gateway on this port of loopback is alive."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(PING)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False


class GivenUp(EngineStartError):
    """A worker has ended soon after its start too often."""


@dataclass(eq=False)
class GpuWorker:
    """Keeps one worker running; ``ping`` checks whether it is alive."""

    placement: WorkerPlacement
    command: Sequence[str]
    environ: Mapping[str, str]
    _: KW_ONLY
    clock: Callable[[], float]
    ping: Ping = answers
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None

    def __post_init__(self) -> None:
        one = self.placement
        self._log = structlog.get_logger("gateway").bind(
            worker_number=str(one.number), gpu=one.devices, port=one.port
        )

    async def run(self) -> None:
        """Keep the worker running until cancelled; then stop it.

        Raises GivenUp: the worker ended too often soon after its start.
        """
        log, short = self._log, 0
        try:
            while True:
                started_at = self.clock()
                code = await self._exit_code()
                lived_s = self.clock() - started_at
                short = 0 if lived_s >= HEALTHY_S else short + 1
                if short >= MAX_SHORT_RUNS:
                    log.error("worker given up", exit_code=code, short_lives=short)
                    raise GivenUp(f"{self.placement} ended {short} times at once, last with exit code {code}")
                wait_s = BACKOFF_S[min(max(short, 1), len(BACKOFF_S)) - 1]
                log.warning("worker ended", exit_code=code, lived_s=round(lived_s, 1), again_in_s=wait_s)
                await asyncio.sleep(wait_s)
                self.restarts += 1
        finally:
            await self._stop()

    async def _exit_code(self) -> int | str:
        """Start the worker and watch it until it ends; returns its exit code, or why it did not start."""
        try:
            process = self.process = await self._start()
        except OSError as error:  # for example memory is short, which must not end the other workers
            return error.strerror or type(error).__name__
        self._log.info("worker started", pid=process.pid)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(process))
            code = await process.wait()
            watch.cancel()
        return code

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the worker if it has answered before and no longer does, so that it is restarted.

        A worker that is still starting is not checked, nor is its engine, which the worker supervises.
        """
        answered, silent = False, 0
        while silent < MOST_SILENT:
            await asyncio.sleep(PING_EVERY_S)
            if await self.ping(self.placement.port, PING_TIMEOUT_S):
                answered, silent = True, 0
            else:
                silent += answered
        self._log.error("worker does not answer", pid=process.pid, asked=silent)
        _kill(process)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.command,
            env=dict(self.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # Ctrl-C at the terminal must reach only the front gateway, which drains first.
            start_new_session=True,
            preexec_fn=_end_with_the_front if sys.platform == "linux" else None,
        )

    async def _stop(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            _kill(process)
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the worker's process group, which includes its engine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_with_the_front() -> None:
    """Runs in the child before exec: asks the kernel to kill the worker when the front gateway dies.

    With SIGKILL: nobody receives the answers any more, and a stopped process handles no other signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
