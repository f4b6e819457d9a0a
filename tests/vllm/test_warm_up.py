"""The requests with which an engine is warmed up before it takes work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.backends.port import DeltaSink, Work
from gateway.backends.vllm.backend import warm_up
from gateway.backends.vllm.values import EngineShape
from gateway.contracts.values import FormatType
from resilience.failures import BackendFailure, FailureKind

SHAPE = EngineShape(max_model_len=4096, block_size=32, total_blocks=100, max_num_seqs=8, max_loras=0)


class Engine(SimpleNamespace):
    """Records its requests, and refuses those for which ``refuses`` is true."""

    async def run(self, work: Work, out: DeltaSink) -> None:
        self.asked.append(work)
        if self.refuses(work):
            raise BackendFailure(FailureKind.INVALID_INPUT, "not here")


def engine(refuses: Any = lambda work: False) -> Any:
    return Engine(shape=SHAPE, asked=[], refuses=refuses)


async def test_log_probabilities_and_json_are_asked_for_before_a_caller_asks() -> None:
    """vLLM compiles code at the first log-probability: its supervisor took the engine for hung."""
    warmed = engine()
    await warm_up(warmed)
    kinds = [(work.sampling.logprobs, work.response_format.type) for work in warmed.asked]
    assert (1, FormatType.TEXT) in kinds and (None, FormatType.JSON_OBJECT) in kinds
    assert kinds.count((None, FormatType.TEXT)) == 2


async def test_an_engine_that_allows_no_log_probabilities_starts_and_one_that_cannot_generate_does_not() -> (
    None
):
    bare = engine(
        lambda work: work.sampling.logprobs is not None or work.response_format.type is not FormatType.TEXT
    )
    await warm_up(bare)
    assert len(bare.asked) == 4
    with pytest.raises(BackendFailure):
        await warm_up(engine(lambda work: True))
