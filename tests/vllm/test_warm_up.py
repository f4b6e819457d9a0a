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


async def test_what_vllm_compiles_at_its_first_use_is_asked_for_before_a_caller_asks() -> None:
    """The supervisor took an engine for hung that compiled code for the first log-probability."""
    warmed = engine()
    await warm_up(warmed)
    asked = [work.sampling for work in warmed.asked]
    assert any(one.logprobs for one in asked)
    limited = {(bool(one.top_k), one.top_p != 1.0) for one in asked}
    assert limited == {(False, False), (False, True), (True, False), (True, True)}
    assert any(one.min_p and one.presence_penalty and one.logit_bias and one.min_tokens for one in asked)
    assert {work.response_format.type for work in warmed.asked} == {FormatType.TEXT, FormatType.JSON_OBJECT}


async def test_an_engine_that_refuses_what_few_ask_for_starts_and_one_that_cannot_generate_does_not() -> None:
    bare = engine(lambda work: work.generation_id not in ("warm-up-0", "warm-up-1"))
    await warm_up(bare)
    assert len(bare.asked) == 7
    with pytest.raises(BackendFailure):
        await warm_up(engine(lambda work: True))
