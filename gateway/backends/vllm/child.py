"""Runs inside vLLM's own processes: sends their logs to the gateway, and ends them when the gateway ends.

vLLM calls :func:`handler` in each of its processes, because its logging configuration names that function.
In the gateway's own process the handler only passes records on to the gateway's logs. This module imports
nothing but the standard library.
"""

import atexit
import contextlib
import gc
import io
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback

# Longest text, characters: a datagram must fit the socket's buffer; of a traceback its end is sent.
MAX_TEXT = 16_000


def handler(address: str, ours: int) -> logging.Handler:
    """The handler of vLLM's loggers in this process.

    Args:
        address: the Unix socket on which the gateway listens.
        ours: the gateway's process id.
    """
    if os.getpid() == ours or multiprocessing.parent_process() is None:
        return Forward()
    sender = LogSender(address)
    if not isinstance(sys.stderr, Lines):  # vLLM configures its logging more than once
        os.dup2(2, 1)  # vLLM must not write to the gateway's standard output
        sys.stdout = sys.stderr = Lines(sender)
        threading.Thread(target=_end_with_the_parent, name="end-with-the-parent", daemon=True).start()
        atexit.register(_end_quickly)
    return sender


class Forward(logging.Handler):
    """Passes records to the handlers of the gateway's process, except what the gateway logs itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, unless it is vLLM's traceback of an engine that is gone."""
        if record.exc_info and record.exc_info[0] and record.exc_info[0].__name__ == "EngineDeadError":
            return
        logging.getLogger().handle(record)


class LogSender(logging.Handler):
    """Sends each record of vLLM's processes to the gateway; a record that cannot be sent is dropped."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        error = trace = ""
        if record.exc_info and record.exc_info[1] is not None:
            error = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"[:MAX_TEXT]
            trace = "".join(traceback.format_exception(record.exc_info[1]))[-MAX_TEXT:]
        self.send(record.levelno, record.getMessage(), error, trace)

    def send(self, level: int, message: str, error: str = "", trace: str = "") -> None:
        line = {"process": multiprocessing.current_process().name, "pid": os.getpid(), "level": level}
        line |= {"message": message[:MAX_TEXT], "error": error, "trace": trace}
        with contextlib.suppress(OSError):
            self._socket.sendto(json.dumps(line).encode(), self._address)


class Lines(io.TextIOBase):
    """A standard stream whose lines go to the gateway's logs, at the lowest level."""

    encoding = "utf-8"

    def __init__(self, sender: LogSender) -> None:
        self._sender = sender
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                self._sender.send(logging.DEBUG, line)
        self._rest = self._rest[-MAX_TEXT:]
        return len(text)

    def fileno(self) -> int:
        """The descriptor of standard error, for libraries that write to it directly."""
        return 2

    def writable(self) -> bool:
        return True


def _end_with_the_parent() -> None:
    """Kill this process when its parent ends: vLLM's core would outlive it, and keep the GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _end_quickly() -> None:
    """Leave what vLLM has imported to the operating system: to free it takes seconds of CPU time.

    The core waits for its workers, and the gateway for the core. vLLM does the same on ROCm. Libraries would
    report what is not freed as leaks, on a standard error that nothing else uses any more.
    """
    gc.freeze()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
