"""A backend that plays a script: the fake of the port, for tests and for measuring the gateway alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from admission.values import Load
from gateway.backends.port import BackendState, Completion, Delta, DeltaSink, Feature, Work
from gateway.contracts.values import FinishReason, Usage
from resilience.failures import BackendFailure


@dataclass(frozen=True, slots=True)
class Script:
    """What one call does: the pieces it gives, seconds before each, and how it ends."""

    pieces: tuple[str, ...] = ("Hello", " there", ".")
    delay_s: float = 0.0
    failure: BackendFailure | None = None
    finish_reason: FinishReason = FinishReason.STOP
    cached_tokens: int = 0


class ScriptedBackend:
    """Plays scripts, one a call; the last one is repeated. Obeys every invariant of the port."""

    kind = "embedded"

    def __init__(
        self,
        name: str = "local",
        *,
        scripts: Sequence[Script] = (Script(),),
        model: str = "scripted",
        features: frozenset[Feature] = frozenset(Feature),
        state: BackendState = BackendState.READY,
        load: Load | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.features = features
        self.state = state
        self.load = load
        self.calls: list[Work] = []
        self.active = 0
        self._scripts = list(scripts)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Play the next script."""
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        self.calls.append(work)
        self.active += 1
        try:
            for number, piece in enumerate(script.pieces):
                await asyncio.sleep(script.delay_s)
                first = number == 0
                await out(Delta(piece, 1, script.cached_tokens if first else None, 0.0 if first else None))
            if script.failure is not None:
                raise script.failure
            usage = Usage(len(work.token_ids), len(script.pieces), script.cached_tokens)
            return Completion(script.finish_reason, usage)
        finally:
            self.active -= 1
