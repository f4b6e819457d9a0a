"""A backend that plays a script: the fake of the port, for tests and for measuring the gateway alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from admission.values import Load
from gateway.backends.port import BackendState, Completion, Continue, Delta, DeltaSink, Feature, Work
from gateway.contracts.values import FinishReason, TokenLogprob, Usage
from resilience.failures import BackendFailure

EVEN = math.log(0.5)


@dataclass(frozen=True, slots=True)
class Script:
    """What one call does: the pieces it gives of each text, seconds before each, and how it ends.

    A piece is one token, and as likely as not.
    """

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
        continues: frozenset[Continue] = frozenset(),
    ) -> None:
        self.name = name
        self.model = model
        self.features = features
        self.state = state
        self.load = load
        self.continues = continues
        self.calls: list[Work] = []
        self.active = 0
        self._scripts = list(scripts)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Play the next script."""
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        self.calls.append(work)
        self.active += 1
        try:
            n, told = work.sampling.n, work.sampling.logprobs is not None
            for number, piece in enumerate(script.pieces):
                await asyncio.sleep(script.delay_s)
                cached_tokens, wait_s = (script.cached_tokens, 0.0) if number == 0 else (None, None)
                logprobs = (TokenLogprob(piece.encode(), EVEN),) if told else ()
                for index in range(n):
                    await out(Delta(piece, 1, cached_tokens, wait_s, index, logprobs))
            if script.failure is not None:
                raise script.failure
            usage = Usage(len(work.token_ids), n * len(script.pieces), script.cached_tokens)
            return Completion(script.finish_reason, usage, others=(script.finish_reason,) * (n - 1))
        finally:
            self.active -= 1
