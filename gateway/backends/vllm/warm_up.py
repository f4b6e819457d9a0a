"""The first requests to a vLLM that has just loaded; their answers are discarded."""

from __future__ import annotations

from gateway.backends.port import Delta
from gateway.backends.vllm.values import EngineRequest, LoadedEngine
from gateway.contracts.values import FormatType, ResponseFormat, Sampling
from resilience.failures import BackendFailure

# Longer than a block, so that the second prompt hits the first one's cached block.
PROMPT = 48
TOKENS = 8


async def warm_up(engine: LoadedEngine) -> None:
    """Run the first prefill, decode, sampling and grammar compilation: each is slow once.

    Raises BackendFailure when it cannot generate; failures of JSON are ignored, since not every model can.
    """
    length = min(PROMPT, engine.shape.max_model_len - TOKENS)
    drawn = Sampling(max_tokens=TOKENS, temperature=1.0, top_p=0.9, top_k=5, min_p=0.0, seed=1)
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    for number, (sampling, wanted) in enumerate(
        (
            (greedy, ResponseFormat()),
            (drawn, ResponseFormat()),
            (greedy, ResponseFormat(FormatType.JSON_OBJECT)),
        )
    ):
        request = EngineRequest(f"warm-up-{number}", (1,) * length, sampling, wanted, cache_salt="warm-up")
        try:
            await engine.run(request, _discard)
        except BackendFailure:
            if wanted.type is FormatType.TEXT:
                raise


async def _discard(delta: Delta) -> None:
    """Ignore the text."""
