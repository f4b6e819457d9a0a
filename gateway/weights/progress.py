"""Shows the progress of a fetch as log lines or as a bar on a terminal."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from gateway.weights.values import OnProgress, Progress

LOG_EVERY_S = 10.0


class LogProgress:
    """Logs the progress of a fetch at intervals."""

    def __init__(self, source: str, clock: Callable[[], float]) -> None:
        self._log = structlog.get_logger("weights")
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._began: tuple[float, int] | None = None
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Log the progress if it is due; called after each chunk, from any thread."""
        with self._lock:
            now = self._clock()
            if self._began is None:
                self._began = (now, progress.done)
                self._next_s = now + LOG_EVERY_S
            if now < self._next_s:
                return
            self._next_s = now + LOG_EVERY_S
            began_s, done_before = self._began
        self._log.info(
            "fetching weights",
            source=self._source,
            done_mib=progress.done >> 20,
            total_mib=progress.total >> 20,
            percent=round(100 * progress.done / progress.total) if progress.total else None,
            mib_per_s=round((progress.done - done_before) / 2**20 / (now - began_s), 1),
        )


@contextmanager
def bar(console: Console, source: str) -> Iterator[OnProgress]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(f"fetching {source}", total=None)

        def on_progress(progress: Progress) -> None:
            shown.update(task, completed=progress.done, total=progress.total or None)

        yield on_progress
