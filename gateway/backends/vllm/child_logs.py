"""Receives the log lines of vLLM's processes and writes them to the gateway's logs."""

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import structlog

# The environment variable with the path of vLLM's logging configuration.
CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
CONFIG_FILE = "logging.json"
MAX_STORED = 200  # more than vLLM logs at warning and above while it starts; enough to find the first error
# Errors logged within this time before the engine's death, seconds, are reported as its cause.
RECENT_S = 10.0
RECEIVE_BYTES = 1 << 20
MAX_AT_ONCE = 64  # most datagrams read in one call, so that a flood does not block the event loop


@dataclass(frozen=True, slots=True)
class ChildLogLine:
    """One line of a process of vLLM; ``error`` is ``Class: message`` when an exception was logged."""

    process: str
    pid: int
    level: int
    message: str
    error: str
    trace: str


class ChildLogs:
    """Listens to vLLM's processes on a Unix socket in a folder of its own.

    While the engine starts, errors are logged at debug level: the start's own error says the same in one
    line. After :meth:`started` they are logged at their own level.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sluice-vllm-"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._socket.bind(str(self.folder / "logs"))
        self._errors: deque[tuple[float, ChildLogLine]] = deque(maxlen=MAX_STORED)  # each with its time
        self._clock = time.monotonic
        self._starting = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log = structlog.get_logger("vllm")

    def write_config(self, level: str) -> Path:
        """Write the logging configuration that every process of vLLM reads; returns its path."""
        handler = {
            "()": "gateway.backends.vllm.child.handler",
            "address": str(self.folder / "logs"),
            "ours": os.getpid(),
        }
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"gateway": handler},
            "loggers": {"vllm": {"handlers": ["gateway"], "level": level, "propagate": False}},
        }
        path = self.folder / CONFIG_FILE
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    def listen(self) -> None:
        """Receive lines from now on. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.drain)

    def started(self) -> None:
        """Log errors at their own level from now on, since the engine runs."""
        self._starting = False
        self._errors.clear()

    @property
    def errors(self) -> tuple[ChildLogLine, ...]:
        """Errors received, the oldest first."""
        self.drain()
        return tuple([line for _, line in self._errors])

    def recent_errors(self) -> list[str]:
        self.drain()
        since = self._clock() - RECENT_S
        return [line.error for at, line in self._errors if at >= since]

    def drain(self) -> None:
        """Log the lines that wait to be read, up to :data:`MAX_AT_ONCE`."""
        for _ in range(MAX_AT_ONCE):
            try:
                line = ChildLogLine(**json.loads(self._socket.recv(RECEIVE_BYTES)))
            except OSError:  # nothing waits, or it is closed
                return
            except (ValueError, TypeError):
                continue
            self._take(line)

    def _take(self, line: ChildLogLine) -> None:
        if line.level >= logging.ERROR:
            self._errors.append((self._clock(), line))
        level = logging.DEBUG if self._starting and line.level >= logging.ERROR else line.level
        extra = {"error": line.error, "trace": line.trace} if line.error else {}
        self._log.log(level, line.message, process=line.process, pid=line.pid, **extra)

    def close(self) -> None:
        # Processes that are started later must not look for the file.
        if os.environ.get(CONFIG_VARIABLE) == str(self.folder / CONFIG_FILE):
            del os.environ[CONFIG_VARIABLE]
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)
