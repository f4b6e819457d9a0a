"""Recovery after memory ran out: less load, later more again, and an engine of fewer blocks. Reads one file.

This is the third of three layers. Prevention is the token budget and admission's forecast; containment is the
retry of the failed request with a shorter context; recovery is for later requests.
"""

from pathlib import Path

from resilience.classify import kind_of_text
from resilience.failures import FailureKind
from resilience.supervisor import Loss

# Multiplicative decrease, additive increase. A step down takes away 30 % at once: the memory is far too small
# for the same load, and each further failure costs an answer. A step up adds 5 %, so a load that the backend
# cannot hold is tried again once in a minute, not in every step of the engine.
SHRINK = 0.7
RESTORE = 0.05
RESTORE_EVERY_S = 10.0
# A quarter of the load is always admitted: if even that is too much, the cause is not the load, and a restart
# or an operator must help.
LEAST = 0.25
# Requests that fail in one step of the engine fail for one reason: the factor shrinks once within this time.
ONE_INCIDENT_S = 2.0
# This file counts the processes that the kernel has killed because memory ran out, also in containers.
VMSTAT = Path("/proc/vmstat")


class LoadFactor:
    """The share of its usual load that one backend gets, in [``LEAST``, 1].

    It falls when memory runs out, and rises by ``RESTORE`` in every ``RESTORE_EVERY_S`` without such an
    incident.
    """

    def __init__(self) -> None:
        self._value = 1.0
        self._last_incident_at = 0.0
        self._shrunk_at = float("-inf")

    def ran_out(self, now: float) -> float:
        """Record that memory ran out; returns the new factor."""
        value = self.at(now)
        if now - self._shrunk_at >= ONE_INCIDENT_S:
            value = max(LEAST, value * SHRINK)
            self._shrunk_at = now
        self._value, self._last_incident_at = value, now
        return value

    def at(self, now: float) -> float:
        """The factor at this time; asking changes nothing."""
        return min(1.0, self._value + self._steps(now) * RESTORE) if self._value < 1.0 else 1.0

    def next_change(self, now: float) -> float | None:
        """When the passing time will raise the factor next; ``None`` at 1."""
        if self.at(now) >= 1.0:
            return None
        return self._after(self._steps(now) + 1)

    def _steps(self, now: float) -> int:
        steps = max(0, int((now - self._last_incident_at) // RESTORE_EVERY_S))
        return steps + 1 if self._after(steps + 1) <= now else steps  # a division rounds

    def _after(self, steps: int) -> float:
        return self._last_incident_at + steps * RESTORE_EVERY_S


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
        before, found, after = VMSTAT.read_text(encoding="ascii").partition("oom_kill ")
    except OSError:
        return 0
    return int(after.partition("\n")[0]) if found and before[-1:] in ("", "\n") else 0


def fewer_blocks(blocks: int, *, at_first: int, least: int) -> int:
    """Blocks of the next engine's KV pool after an engine with ``blocks`` ran out of memory.

    ``at_first`` are the blocks of the first engine, ``least`` those that the longest request needs.
    """
    return min(blocks, max(least, int(blocks * SHRINK), int(at_first * LEAST)))
