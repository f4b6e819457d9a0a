"""The state of an engine's processes in the operating system."""

from collections.abc import Sequence
from contextlib import suppress

import psutil


def gone_and_stopped(processes: Sequence[psutil.Process]) -> tuple[bool, bool]:
    """Whether one of the processes has ended, and whether one is stopped."""
    found = list(map(_status, processes))
    return psutil.STATUS_ZOMBIE in found, psutil.STATUS_STOPPED in found


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes, stopped ones included; does not wait."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _status(process: psutil.Process) -> str:
    """A process's state; one that no longer exists counts as a zombie."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)
