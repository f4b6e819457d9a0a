"""What runs inside vLLM's own processes: they send their logs to the gateway, and end when it ends.

vLLM makes :func:`handler` in each of its processes, because the logging configuration that it is given names
it. In the gateway's own process it only hands records on to the gateway's logs. Nothing but the standard
library is imported here.
"""

import contextlib
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

# A datagram must fit the socket's buffer; the end of a traceback says most.
MAX_TEXT = 16_000
# Lines of standard error that vLLM and its libraries print without logging them.
PRINTED = "vllm.printed"


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
        os.dup2(2, 1)  # the gateway's standard output is not vLLM's
        sys.stdout = sys.stderr = Lines(sender)
        threading.Thread(target=_end_with_the_parent, name="end-with-the-parent", daemon=True).start()
    return sender


class Forward(logging.Handler):
    """In the gateway's process: passes records to its own handlers, except what the gateway logs itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, unless it is vLLM's traceback of an engine that is gone."""
        if record.exc_info and record.exc_info[0] and record.exc_info[0].__name__ == "EngineDeadError":
            return
        logging.getLogger().handle(record)


class LogSender(logging.Handler):
    """In vLLM's processes: sends each record to the gateway; what cannot be sent is dropped."""

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
        self.send(record.levelno, record.name, record.getMessage(), error, trace)

    def send(self, level: int, logger: str, message: str, error: str = "", trace: str = "") -> None:
        name = multiprocessing.current_process().name
        line = {"process": name, "pid": os.getpid(), "level": level, "logger": logger}
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
        """Take text; whole lines go out."""
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                self._sender.send(logging.DEBUG, PRINTED, line)
        self._rest = self._rest[-MAX_TEXT:]
        return len(text)

    def fileno(self) -> int:
        """The stream beneath, for libraries that write there themselves."""
        return 2

    def writable(self) -> bool:
        return True


def _end_with_the_parent() -> None:
    """vLLM's core outlives a parent that was killed, and keeps the GPU; so this ends it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
