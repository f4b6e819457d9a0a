"""Writes log lines outside the event loop: a bounded queue, and one thread that writes.

A write to a pipe without a reader blocks for ever; it must not block the gateway.
"""

import logging
import queue
import threading
from typing import Final, TextIO

# Most lines that wait: at 1,000 requests a second and one line each, those of ten seconds of a stuck pipe.
MAX_QUEUED_LINES: Final = 10_000
CLOSE_TIMEOUT_S: Final = 2.0
# Lines of this interval are written together: a thread that wakes for each line takes the GIL from the event
# loop each time. A killed process may lose the lines of this interval.
GATHER_S: Final = 0.05


class BatchedLines(logging.StreamHandler[TextIO]):
    """Formats each record at once, and writes the lines together when flushed; for one thread."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) if self.formatter is None else self.formatter.format(record)
            self._lines.append(text + self.terminator)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        if self._lines:
            text = "".join(self._lines)
            self._lines.clear()
            self.stream.write(text)
        super().flush()


class LogWriter(logging.Handler):
    """Formats and writes records in a thread of its own, and flushes ``target`` once per batch.

    At most ``capacity`` records wait; further ones are counted and dropped.
    """

    def __init__(self, target: logging.Handler, *, capacity: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self.dropped = 0
        self._target = target
        self._capacity = capacity
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._reported = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        """Queue a record unformatted, without waiting or the handler's lock: the queue has its own lock."""
        # Other threads may run between the two calls: the bound is exact up to one line per thread.
        if self._lines.qsize() < self._capacity:
            self._lines.put(record)
        else:
            self.dropped += 1
        return True

    def stop(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Write queued records, for at most about ``timeout_s``; returns whether all were written."""
        self._closing.set()
        self._lines.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            record, count, reported = self._lines.get(), 0, self._reported
            self._closing.wait(GATHER_S)
            while record is not None:
                self._target.emit(record)  # no other thread uses it, so its lock and filters are skipped
                count += 1
                if self._lines.empty():
                    break
                record = self._lines.get()
            self._report_losses()
            try:
                self._target.flush()
            except (OSError, ValueError):  # a full disk, a closed pipe: later lines may be written
                self.dropped += count
                self._reported = reported
            if record is None:
                return

    def _report_losses(self) -> None:
        lost = self.dropped - self._reported
        if lost and self._lines.qsize() <= self._capacity // 2:
            self._reported += lost
            notice = logging.LogRecord(
                "sluice.logs", logging.WARNING, __file__, 0, "%d log lines were dropped", (lost,), None
            )
            self._target.handle(notice)
