"""Log lines leave the event loop here: a bounded queue, and one thread that writes.

A pipe that nobody reads blocks a write for ever; the gateway must not stand still because of it.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import threading
from typing import Final

# Lines that may wait. At 1,000 requests a second and one line each, ten seconds of a stuck pipe.
MAX_QUEUED_LINES: Final = 10_000
CLOSE_TIMEOUT_S: Final = 2.0


class QueuedLines(logging.handlers.QueueHandler):
    """Puts records in a bounded queue; those that find it full are counted and dropped."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as it is: it stays in this process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class LogWriter:
    """Formats and writes log records in a thread of its own.

    Args:
        target: writes one record; used by the thread alone.
        capacity: how many records may wait.
    """

    def __init__(self, target: logging.Handler, *, capacity: int = MAX_QUEUED_LINES) -> None:
        self._target = target
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(capacity)
        self.handler = QueuedLines(self._lines)
        self._told = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines lost since the start because the queue was full."""
        return self.handler.dropped

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Write what waits, for at most about ``timeout_s``; whether all was written."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (record := self._lines.get()) is not None:
            self._target.handle(record)
            self._tell_losses()
        self._tell_losses()

    def _tell_losses(self) -> None:
        lost = self.handler.dropped - self._told
        if lost and self._lines.qsize() <= self._lines.maxsize // 2:
            self._told += lost
            notice = logging.LogRecord(
                "sluice.logs", logging.WARNING, __file__, 0, "%d log lines were dropped", (lost,), None
            )
            self._target.handle(notice)
