"""Failures of a vLLM in process that makes vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.backends.port import BackendState
from gateway.backends.vllm.backend import VllmPoolingBackend
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.contracts.embeddings import EmbeddingsRequest
from resilience.failures import BackendFailure, FailureKind
from tests.workers.test_vectors import PART


async def test_a_caller_whose_vectors_failed_on_one_backend_does_not_count_as_gone_on_the_next() -> None:
    async def embed(name: str, ids: Sequence[int], dimensions: int | None) -> str:
        raise BackendFailure(FailureKind.INTERNAL, "the engine failed")

    async def encode(part: EmbeddingsRequest) -> Sequence[Sequence[int]]:
        return [(1, 2)] * len(part.inputs)

    engine: Any = SimpleNamespace(shape=SimpleNamespace(max_model_len=64), embed=embed)
    board = SignalBoard()
    backend = VllmPoolingBackend(
        name="local",
        model="m",
        engine=lambda: engine,
        state_of=lambda: BackendState.READY,
        board=board,
        encode=encode,
    )
    with pytest.raises(BackendFailure, match="the engine failed"):
        await backend.embed(PART)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert board.in_flight == 0
