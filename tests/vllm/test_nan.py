"""A model that computes NaN: vLLM's own flag ends the request that has NaN, and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.values import Adapter
from gateway.contracts.events import Delta
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import DEMO_MODEL, Specimen, collect
from tests.engine.adapters import write_adapter
from tests.vllm.conftest import needs_vllm

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *needs_vllm]


def nan_adapter(folder: Path) -> Adapter:
    """An adapter with NaN in the last layer's output, after all keys and values, so the cache stays valid."""
    write_adapter(folder, DEMO_MODEL, seed=1, rank=4, targets=["down_proj"])
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    layers = sorted({int(name.split(".layers.")[1].split(".")[0]) for name in weights})
    for name, tensor in weights.items():
        last = f".layers.{layers[-1]}." in name
        weights[name] = torch.full_like(tensor, torch.nan) if last else torch.zeros_like(tensor)
    save_file(weights, file)
    return Adapter("nan", 1, "demo", str(folder))


async def test_a_request_whose_logits_are_nan_fails_and_its_neighbours_go_on(
    vllm: Specimen, tmp_path: Path
) -> None:
    adapter = await asyncio.to_thread(nan_adapter, tmp_path / "nan")
    # Both have adapters: if only one had, vLLM's CPU kernels would give the base the last slot's weights.
    other = vllm.adapters["conform_a"]
    before = await collect(
        vllm.backend, vllm.work("Hello", max_tokens=24, adapter=other, cache_salt="before")
    )
    answer: list[Delta] = []

    async def out(delta: Delta) -> None:
        answer.append(delta)

    async def bad() -> FailureKind:
        with pytest.raises(BackendFailure) as caught:
            await vllm.backend.generate(vllm.work("Hello", adapter=adapter, max_tokens=24), out)
        return caught.value.kind

    kind, neighbour = await asyncio.gather(
        bad(), collect(vllm.backend, vllm.work("Hello", max_tokens=24, adapter=other, cache_salt="beside"))
    )
    assert (kind, answer) == (FailureKind.NAN_OUTPUT, [])
    assert neighbour.text == before.text
    await vllm.wait_idle()
