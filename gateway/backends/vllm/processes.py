"""vLLM's processes below this one: the engine's core, its workers, and what they start."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from gateway.backends import host

# The name that vLLM gives its core, and the command lines of its processes before and after they set titles.
_CORE = "EngineCore"
_TRACES = ("spawn_main", "vllm.model_executor.models.registry")
_TITLE = "VLLM::"
_SHARED, _SEGMENT = Path("/dev/shm"), "psm_"  # folder and name prefix of multiprocessing's segments on Linux


def children() -> frozenset[psutil.Process]:
    return frozenset(psutil.Process().children())


def cores(mine: Callable[[psutil.Process], bool]) -> list[BaseProcess]:
    """The running cores of an engine; ``mine`` says whether a process is this engine's."""
    living = {one.pid for one in filter(mine, children()) if not host.gone_and_stopped([one])[0]}
    # multiprocessing also lists processes that were reaped elsewhere.
    return [
        child
        for child in multiprocessing.active_children()
        if child.name.startswith(_CORE) and child.pid in living
    ]


def below(mine: Callable[[psutil.Process], bool] = lambda child: True) -> list[psutil.Process]:
    found = []
    for child in filter(mine, children()):
        with contextlib.suppress(psutil.Error):
            found += [child, *child.children(recursive=True)]
    return [one for one in found if _is_vllms(one)]


def _is_vllms(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        shown = [process.name(), *process.cmdline()]
        return any(word.startswith(_TITLE) or any(trace in word for trace in _TRACES) for word in shown)
    return False


def shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    """The segments of shared memory that the processes use. Blocks."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            paths = [Path(file.path) for file in process.open_files()]
            found |= {path for path in paths if path.parent == _SHARED and path.name.startswith(_SEGMENT)}
    return found


def release(segments: Iterable[Path]) -> None:
    """Free the segments of killed processes, which would stay until the gateway ends. Blocks."""
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):
            segment.unlink()
            resource_tracker.unregister(f"/{segment.name}", "shared_memory")


def kill(processes: Sequence[psutil.Process], timeout_s: float = 5.0) -> list[psutil.Process]:
    """Kill them; returns those that still run after ``timeout_s``. Blocks; not for the event loop."""
    host.kill(processes)
    return list(psutil.wait_procs(processes, timeout_s)[1])
