"""Ports of components that run as long as the gateway: the engine in process, pools of workers.

And the state of an engine's processes in the operating system.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from engine.errors import EngineDead
from gateway.backends.port import Backend, BackendState
from observability.events import EngineFigures
from resilience.heartbeat import PromptTokens


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The limits of a loaded engine, tokens and KV blocks; ``details`` (dtype, device…) are for operators."""

    max_model_len: int
    block_size: int
    total_blocks: int
    details: Mapping[str, object] = field(default_factory=dict)


class EngineHost(Protocol):
    """One engine in the gateway's process tree, from its one start to its end.

    Invariants: ``stop`` may be called in any state, also while ``start`` runs, and leaves no process;
    ``figures``, ``unfinished`` and ``exit_code`` do no I/O.
    """

    @property
    def state(self) -> BackendState:
        """The engine's state."""

    @property
    def unfinished(self) -> int:
        """Sequences that the engine has accepted and not ended."""

    @property
    def pending(self) -> PromptTokens:
        """Most prompt tokens that the engine's current step may compute."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that its last step computed."""

    @property
    def occupied(self) -> bool:
        """Whether it executes a call other than generation, such as loading an adapter."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of its first process that ended by itself, negative for a signal; ``None``: unknown."""

    @property
    def last_error(self) -> str:
        """The last errors of its processes, ``Class: message``; empty: none was reported."""

    def figures(self) -> EngineFigures | None:
        """The engine's figures after its last step; ``None`` before it has loaded."""

    def find_processes(self) -> Sequence[psutil.Process]:
        """The engine's processes now. Scans the machine's processes: not for the event loop."""

    async def start(self) -> EngineFacts:
        """Load and warm up. Raises EngineStartError, whose message says what to fix."""

    async def stop(self, timeout_s: float) -> None:
        """Stop the engine gracefully, by force after ``timeout_s``."""

    def backend(self, name: str) -> Backend:
        """The engine as a backend of that name."""


class MakeHost(Protocol):
    """Makes an engine that has not been started."""

    def __call__(
        self,
        *,
        on_step: Callable[[int], None],
        on_death: Callable[[EngineDead], None],
        kv_blocks: int | None = None,
    ) -> EngineHost:
        """Make an engine that reports its preemptions so far after each step, and its death once."""


class Resident(Protocol):
    """A backend with loops of its own (probes, scrapes, connection pools)."""

    async def run(self) -> None:
        """Run until cancelled; releases everything that it holds when it ends."""


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
