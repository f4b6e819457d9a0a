"""vLLM's processes below this one: the engine's core, its workers, and what they start."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence

import psutil

# The names that vLLM gives its core, and what its processes show before and after they have set their titles.
_CORE = "EngineCore"
_TRACES = ("spawn_main", "vllm.model_executor.models.registry")
_TITLE = "VLLM::"


def core_sentinels() -> list[int]:
    """For each core, a file descriptor of the caller's own that becomes readable when the core ends."""
    living = {
        process.pid for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE
    }
    # multiprocessing also lists, for ever, what somebody else has waited for.
    return [
        os.dup(child.sentinel)
        for child in multiprocessing.active_children()
        if child.name.startswith(_CORE) and child.pid in living
    ]


def below() -> list[psutil.Process]:
    """vLLM's processes below this one, now."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            shown = [process.name(), *process.cmdline()]
            if any(word.startswith(_TITLE) or any(trace in word for trace in _TRACES) for word in shown):
                found.append(process)
    return found


def kill(processes: Sequence[psutil.Process], timeout_s: float = 5.0) -> list[psutil.Process]:
    """End them now; those that are still there after ``timeout_s``. Blocks; not for the event loop."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return list(psutil.wait_procs(processes, timeout_s)[1])
