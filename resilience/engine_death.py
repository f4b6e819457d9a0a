"""Why an engine's process ended: out of memory, a failed device, or something else. Sans I/O."""

from pathlib import Path

from resilience.classify import kind_of_text
from resilience.failures import FailureKind
from resilience.oom import LEAST, SHRINK
from resilience.supervisor import Loss

# This file counts the processes that the kernel has killed because memory ran out, also in containers.
VMSTAT = Path("/proc/vmstat")


def cause_of_death(error: str, *, oom_kills: int) -> Loss:
    """The cause, by the last error of the engine's processes (``Class: message``) and the kernel's OOM kills.

    ``oom_kills`` is their number in the last seconds: a killed process logs nothing, and its exit code (-9)
    is that of any ``kill -9``.
    """
    kind = kind_of_text(error)
    if kind is FailureKind.CUDA_OOM or oom_kills > 0:
        return Loss.OUT_OF_MEMORY
    return Loss.DEVICE if kind is FailureKind.CUDA_DRIVER_ERROR else Loss.EXITED


def kernel_oom_kills() -> int:
    """Processes killed by the kernel since the machine's start because memory ran out; 0 if unknown."""
    try:
        lines = VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def fewer_blocks(blocks: int, *, at_first: int, least: int) -> int:
    """Blocks of the next engine's KV pool after an engine with ``blocks`` ran out of memory.

    ``at_first`` are the blocks of the first engine, ``least`` those that the longest request needs.
    """
    return min(blocks, max(least, int(blocks * SHRINK), int(at_first * LEAST)))
