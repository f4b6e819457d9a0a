"""The first requests of a vLLM that has just loaded; their answers are discarded."""

from __future__ import annotations

import contextlib

from gateway.backends.port import Delta
from gateway.backends.vllm.values import EngineRequest, LoadedEngine
from gateway.contracts.values import FormatType, ResponseFormat, Sampling
from resilience.failures import BackendFailure

# A block and a bit, so that the second prompt finds the first one's block.
PROMPT = 48
TOKENS = 8


async def warm_up(engine: LoadedEngine) -> None:
    """The first prefill, the first decode, drawing, and the grammar compiler: each is slow once.

    Raises:
        BackendFailure: it cannot generate; of a shape alone, which not every model can, none.
    """
    length = min(PROMPT, engine.shape.max_model_len - TOKENS)
    drawn = Sampling(max_tokens=TOKENS, temperature=1.0, top_p=0.9, top_k=5, min_p=0.0, seed=1)
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    for number, (sampling, shape) in enumerate(
        (
            (greedy, ResponseFormat()),
            (drawn, ResponseFormat()),
            (greedy, ResponseFormat(FormatType.JSON_OBJECT)),
        )
    ):
        with (
            contextlib.suppress(BackendFailure)
            if shape.type is not FormatType.TEXT
            else contextlib.nullcontext()
        ):
            await engine.run(
                EngineRequest(f"warm-up-{number}", (1,) * length, sampling, shape, cache_salt="warm-up"),
                _discard,
            )


async def _discard(delta: Delta) -> None:
    """Ignore the text."""
