"""One worker process: started, started again when it ends, stopped with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from engine.errors import EngineStartError
from gateway.gpus.layout import WORKER_DRAIN_S, Seat

# Waits before a new life; the last one holds from then on.
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# Who lived so long was well, and the next loss is a new story.
WELL_S = 120.0
# So many short lives in a row are a fault that a restart does not mend.
MOST_SHORT_LIVES = 6
# The drain, the engine's stop, and slack.
STOP_S = WORKER_DRAIN_S + 25.0
PR_SET_PDEATHSIG = 1


class GivenUp(EngineStartError):
    """A worker has ended at once too often."""


class GpuWorker:
    """Keeps one worker running.

    Args:
        seat: its GPU and port.
        command: what to run.
        environ: its environment.
        clock: monotonic seconds.
    """

    def __init__(
        self, seat: Seat, command: Sequence[str], environ: Mapping[str, str], *, clock: Callable[[], float]
    ) -> None:
        self.seat = seat
        self.restarts = 0
        self._command = command
        self._environ = environ
        self._clock = clock
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
        log, short = structlog.get_logger("gateway").bind(gpu=self.seat.devices, port=self.seat.port), 0
        try:
            while True:
                begun = self._clock()
                process = self._process = await self._start()
                log.info("worker started", pid=process.pid)
                code = await process.wait()
                lived_s = self._clock() - begun
                short = 0 if lived_s >= WELL_S else short + 1
                if short >= MOST_SHORT_LIVES:
                    log.error("worker given up", exit_code=code, short_lives=short)
                    raise GivenUp(f"the worker of GPU {self.seat.devices or '-'} ended {short} times at once")
                wait_s = BACKOFF_S[min(max(short, 1), len(BACKOFF_S)) - 1]
                log.warning("worker ended", exit_code=code, lived_s=round(lived_s, 1), again_in_s=wait_s)
                await asyncio.sleep(wait_s)
                self.restarts += 1
        finally:
            await self._stop()

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
            # Its own session: the engine goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _end_with_the_front() -> None:
    """In the child, before it is a worker: a front that was killed takes its workers with it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def command_of(config: Path, log_level: str) -> list[str]:
    """What a worker runs."""
    return [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--log-level", log_level]
