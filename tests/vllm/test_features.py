"""What a vLLM in process can be asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.backends.port import BackendState
from gateway.backends.vllm.backend import VllmBackend
from gateway.backends.vllm.values import EngineShape
from gateway.contracts.features import Feature
from gateway.contracts.values import Sampling


@pytest.mark.parametrize("speculates", [True, False])
def test_what_vllm_refuses_with_speculation_is_no_feature(speculates: bool) -> None:
    shape = EngineShape(4096, 32, 100, max_num_seqs=8, speculates=speculates)
    others: Any = SimpleNamespace(shape=shape, places=0)
    backend = VllmBackend(
        name="local",
        model="base",
        engine=lambda: others,
        state_of=lambda: BackendState.READY,
        board=others,
        defaults=Sampling(),
        loaded=others,
        slots=others,
        share_prefixes=False,
        takes_tools=lambda: False,
    )
    refused = {Feature.MIN_P, Feature.LOGIT_BIAS}
    assert refused & backend.features == (set() if speculates else refused)
