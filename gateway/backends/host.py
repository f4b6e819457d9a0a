"""Ports of components that run as long as the gateway: the engine in process, pools of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import psutil

from engine.errors import EngineDead
from gateway.backends.port import Backend, BackendState
from observability.events import EngineFigures


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine knows of itself once it has loaded.

    Args:
        max_model_len: prompt and output together, in tokens, as it really holds.
        block_size: tokens a KV block holds.
        total_blocks: KV blocks of the pool.
        details: what an operator wants to read next to them (parameters, dtype, device, seconds to load).
    """

    max_model_len: int
    block_size: int
    total_blocks: int
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


class EngineHost(Protocol):
    """One engine in the gateway's process tree, of whichever kind, from its one start to its end.

    Invariants: ``stop`` may be called in any state, also while ``start`` runs or after it failed, and leaves
    no process behind; ``facts``, ``figures``, ``unfinished`` and ``exit_code`` only read what is known
    already.
    """

    @property
    def state(self) -> BackendState:
        """The engine's state."""

    @property
    def facts(self) -> EngineFacts | None:
        """What has loaded; ``None`` before."""

    @property
    def unfinished(self) -> int:
        """Sequences that the engine was given and has not ended."""

    @property
    def exit_code(self) -> int | None:
        """Of its first process that ended by itself, negative for a signal; ``None``: not known."""

    def figures(self) -> EngineFigures | None:
        """The engine's figures after its last step; ``None`` before it has loaded."""

    def find_processes(self) -> Sequence[psutil.Process]:
        """Its processes now. Looks through the machine's: not for the event loop."""

    async def start(self) -> EngineFacts:
        """Load and warm up.

        Raises:
            EngineStartError: it cannot be started; the message says what to fix.
        """

    async def stop(self, timeout_s: float) -> None:
        """Stop it gracefully, by force after ``timeout_s``."""

    def backend(self, name: str) -> Backend:
        """The engine as a backend of that name."""


class MakeHost(Protocol):
    """Makes an engine that has not been started."""

    def __call__(
        self, *, on_step: Callable[[int], None], on_death: Callable[[EngineDead], None]
    ) -> EngineHost:
        """One that tells its counter of preemptions after each step, and once that it died by itself."""


class Resident(Protocol):
    """A backend with loops of its own (probes, scrapes, connection pools)."""

    async def run(self) -> None:
        """Run until cancelled; gives back all it holds when it ends."""
