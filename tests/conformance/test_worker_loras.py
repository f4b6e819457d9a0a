"""Adapters that the pool loads on a real ``vllm serve`` while it serves."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from adapters.values import Adapter
from gateway.backends.workers.loras import loaded_name
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.conftest import LONG_QUESTION, SLOW
from tests.conformance.harness import collect, make_adapters
from tests.conformance.specimens import remote
from tests.integration.live import ADMIN_KEY

pytestmark = [pytest.mark.xdist_group("conformance-vllm-worker"), *SLOW]


async def test_loaded_adapters_answer_as_fixed_ones_and_new_weights_find_no_old_cache(
    vllm_server: str, workshop: Path, tmp_path: Path
) -> None:
    fixed = await asyncio.to_thread(make_adapters, workshop)
    versions = []
    for number, (name, adapter) in enumerate(fixed.items(), start=7):
        shutil.copytree(adapter.path, tmp_path / name)
        versions.append(Adapter("loaded", number, "demo", str(tmp_path / name)))
    options = {"load_adapters": True, "adapters": {name: name for name in fixed}}
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        remote(vllm_server, "vllm", fixed, model="base", options=options) as specimen,
        httpx.AsyncClient(base_url=vllm_server, headers=headers, timeout=60) as direct,
    ):

        async def answer(adapter: Adapter | None) -> tuple[str, int]:
            work = specimen.work(LONG_QUESTION * 8, adapter=adapter, max_tokens=12)
            collected = await collect(specimen.backend, work)
            return collected.text, collected.completion.usage.cached_tokens

        base, _ = await answer(None)
        for version, twin in zip(versions, fixed.values(), strict=True):
            text, cached = await answer(version)
            assert cached == 0, "nothing is cached of weights that are new"
            assert text == (await answer(twin))[0] != base
        assert (await answer(versions[0]))[1] > 0, "what is the same is still cached"

        gone = await direct.post(
            "/v1/unload_lora_adapter", json={"lora_name": loaded_name(versions[0], None)}
        )
        assert gone.status_code == 200
        assert (await answer(versions[0]))[0] == (await answer(fixed["conform_a"]))[0]

        (tmp_path / "conform_b" / "adapter_model.safetensors").write_bytes(b"cut")
        shutil.move(tmp_path / "conform_b", tmp_path / "spoilt")
        for path in ("spoilt", "nowhere"):
            with pytest.raises(BackendFailure) as caught:
                await answer(Adapter(path, 9, "demo", str(tmp_path / path)))
            assert (caught.value.kind, caught.value.param) == (FailureKind.MODEL_NOT_FOUND, "adapter_id")
        assert (await answer(None))[0] == base
        await specimen.wait_idle()
