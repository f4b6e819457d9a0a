"""Starts, signals and ends the processes of a run, and finds the engine's processes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ops.chaos.errors import ChaosError

STOP_WITHIN_S = 20.0
LOG_CHARACTERS = 3000
# In an engine's name or command line: the embedded engine; vLLM's core after and before it sets its title.
ENGINE_TRACES = ("engine.process", "VLLM::EngineCore", "spawn_main")


@dataclass(eq=False)
class Process:
    """A child process in its own session, so that Ctrl-C does not reach it; its log is in ``folder``."""

    role: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.role.replace(':', '-')}.log"
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process id. Raises ChaosError when the process does not run."""
        if self._child is None or self._child.returncode is not None:
            raise ChaosError(f"{self.role} does not run; its log is {self.log}")
        return self._child.pid

    async def start(self, within_s: float) -> str:
        """Start the process; returns its first line of output. Raises ChaosError if none comes in time."""
        with self.log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self.command, env=dict(self.environment), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._child.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                line = await self._child.stdout.readline()
        if not line:
            raise ChaosError(f"{self.role} did not start:\n{self.tail()}")
        return line.decode(errors="replace")

    async def kill(self) -> None:
        """Kill the process and the other processes of its group."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            await self._child.wait()

    async def end(self) -> None:
        """End the process with SIGTERM, after :data:`STOP_WITHIN_S` with SIGKILL."""
        child = self._child
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGCONT)
                child.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_WITHIN_S):
                    await child.wait()
        await self.kill()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARACTERS:]


def check_gateway(pid: int, url: str) -> None:
    """Raise ChaosError unless the process listens on the URL's port: it and its engines may be killed."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        raise ChaosError(f"--pid: there is no process {pid}") from None
    except psutil.AccessDenied:
        raise ChaosError(f"--pid: this user may not look at the sockets of process {pid}") from None
    if not any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets):
        raise ChaosError(
            f"--pid: process {pid} does not listen on port {port}, that of --url ({url}); given must be the "
            "gateway itself, and in --url its own address"
        )


def engine_pids(gateway_pid: int) -> list[int]:
    """Ids of a gateway's engine processes, embedded or vLLM's. Raises ChaosError when there is none."""
    children = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(gateway_pid).children(recursive=True)
    for trace in ENGINE_TRACES:
        found = []
        for process in children:
            with contextlib.suppress(psutil.Error):
                if trace in " ".join((process.name(), *process.cmdline())):
                    found.append(process.pid)
        if found:
            return found
    raise ChaosError(f"the gateway (process {gateway_pid}) has no engine process now")
