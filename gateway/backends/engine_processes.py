"""What the operating system knows of an engine's processes."""

from collections.abc import Sequence
from contextlib import suppress

import psutil


def any_gone(processes: Sequence[psutil.Process]) -> bool:
    return any(_status(process) == psutil.STATUS_ZOMBIE for process in processes)


def any_stopped(processes: Sequence[psutil.Process]) -> bool:
    return any(_status(process) == psutil.STATUS_STOPPED for process in processes)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill them, stopped ones included; does not wait."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _status(process: psutil.Process) -> str:
    """A process's state; one that no longer exists counts as a zombie."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)
