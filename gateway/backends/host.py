"""What the gateway needs of things that live as long as it does: the engine in process, pools of workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from gateway.backends.port import Backend, BackendState
from observability.events import EngineFigures


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine knows of itself once it has loaded.

    Args:
        max_model_len: prompt and output together, in tokens, as it really holds.
        block_size: tokens a KV block holds.
        total_blocks: KV blocks of the pool.
        details: what an operator wants to read beside them (parameters, dtype, device, seconds to load).
    """

    max_model_len: int
    block_size: int
    total_blocks: int
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


class EngineHost(Protocol):
    """The engine in the gateway's process tree, of whichever kind.

    Invariants: ``stop`` may be called in any state, also while ``start`` runs or after it failed, and leaves
    no process behind; ``facts`` and ``figures`` only read what is known already.
    """

    @property
    def state(self) -> BackendState:
        """Where the engine stands."""

    @property
    def facts(self) -> EngineFacts | None:
        """What has loaded; ``None`` before."""

    def figures(self) -> EngineFigures | None:
        """The engine's figures after its last step; ``None`` before it has loaded."""

    async def start(self) -> EngineFacts:
        """Load and warm up.

        Raises:
            EngineStartError: it cannot be started; the message says what to mend.
        """

    async def stop(self, timeout_s: float) -> None:
        """End it: gently at first, by force after ``timeout_s``."""

    def backend(self, name: str) -> Backend:
        """The engine as a backend of that name."""


class Resident(Protocol):
    """A backend with loops of its own (probes, scrapes, connection pools)."""

    async def run(self) -> None:
        """Run until cancelled; gives back all it holds when it ends."""
