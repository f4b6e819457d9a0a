"""One worker process: started, started again when it ends or no longer answers, stopped with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import structlog

from engine.errors import EngineStartError
from ops.gpus.layout import WORKER_DRAIN_S, Seat

# Waits before a new life; the last one holds from then on.
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# Who lived so long was well, and the next loss is a new story.
WELL_S = 120.0
# So many short lives in a row are a fault that a restart does not mend.
MOST_SHORT_LIVES = 6
# The drain, the engine's stop, and slack.
STOP_S = WORKER_DRAIN_S + 25.0
# Liveness, with the times of deploy/k8s: the period, the timeout, and how many failures in a row mean dead.
PING_EVERY_S, PING_TIMEOUT_S, MOST_SILENT = 10.0, 30.0, 3
PING = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PR_SET_PDEATHSIG = 1

# Whether who has the port answers within so many seconds.
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
    """A worker has ended at once too often."""


class GpuWorker:
    """Keeps one worker running.

    Args:
        seat: its GPU and port.
        command: what to run.
        environ: its environment.
        clock: monotonic seconds.
        ping: whether it is alive.
    """

    def __init__(
        self,
        seat: Seat,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float],
        ping: Ping = answers,
    ) -> None:
        self.seat = seat
        self.restarts = 0
        self._command = command
        self._environ = environ
        self._clock = clock
        self._ping = ping
        self._log = structlog.get_logger("gateway").bind(
            worker_number=str(seat.number), gpu=seat.devices, port=seat.port
        )
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the life it lives now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Keep it running until cancelled; then stop it.

        Raises:
            GivenUp: it ends again and again without having lived.
        """
        log, short = self._log, 0
        try:
            while True:
                started_at = self._clock()
                process = self._process = await self._start()
                log.info("worker started", pid=process.pid)
                code = await self._lived(process)
                lived_s = self._clock() - started_at
                short = 0 if lived_s >= WELL_S else short + 1
                if short >= MOST_SHORT_LIVES:
                    log.error("worker given up", exit_code=code, short_lives=short)
                    raise GivenUp(f"{self.seat} ended {short} times at once, last with exit code {code}")
                wait_s = BACKOFF_S[min(max(short, 1), len(BACKOFF_S)) - 1]
                log.warning("worker ended", exit_code=code, lived_s=round(lived_s, 1), again_in_s=wait_s)
                await asyncio.sleep(wait_s)
                self.restarts += 1
        finally:
            await self._stop()

    async def _lived(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code, once it has ended."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(process))
            code = await process.wait()
            watch.cancel()
        return code

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill it when it has answered and no longer does: its GPU would be of no use for ever.

        Its engine is not asked, which the worker watches itself; nor is one judged that has not answered yet.
        """
        heard, silent = False, 0
        while silent < MOST_SILENT:
            await asyncio.sleep(PING_EVERY_S)
            if await self._ping(self.seat.port, PING_TIMEOUT_S):
                heard, silent = True, 0
            else:
                silent += heard
        self._log.error("worker does not answer", pid=process.pid, asked=silent)
        _kill(process)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            env=dict(self._environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            # Ctrl-C at the terminal is the front's: it drains first.
            start_new_session=True,
            preexec_fn=_end_with_the_front if sys.platform == "linux" else None,
        )

    async def _stop(self) -> None:
        process = self._process
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
    """It has a session of its own: the engine goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_with_the_front() -> None:
    """In the child, before it is a worker: a front that was killed takes its workers with it.

    By SIGKILL: nobody is left who would hear the end of their answers, and one that stands still heeds no
    other signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def command_of(config: Path, log_level: str) -> list[str]:
    """What a worker runs."""
    return [sys.executable, "-m", "ops.cli", "serve", "--config", str(config), "--log-level", log_level]
