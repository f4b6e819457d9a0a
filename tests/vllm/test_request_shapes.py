"""What Sluice answers, vLLM answers alike, or the document says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from benchmarks.request_shapes import DOCUMENT, RETRIES, compare, gateway, reason_of, shapes
from tests.conformance.specimens import ADMIN_KEY

pytestmark = [pytest.mark.xdist_group("conformance-vllm-worker"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front(vllm_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A Sluice in front of the worker."""
    server = gateway(vllm_server, tmp_path_factory.mktemp("front"), ADMIN_KEY)
    try:
        await server.wait_ready("/ready")
        yield server.url
    finally:
        server.close()


async def test_every_status_that_differs_from_the_workers_has_a_reason(vllm_server: str, front: str) -> None:
    # vLLM 0.33 on the CPU dies of prompt_logprobs when it is started with LoRA.
    asked = [shape for shape in shapes("base") if "prompt_logprobs" not in shape.name]
    rows = await compare(asked, vllm_server, front, ADMIN_KEY)
    assert [(row.shape.name, row.sluice) for row in rows if row.sluice >= 500] == []
    unexplained = [row for row in rows if row.worker != row.sluice and reason_of(row) is None]
    assert [(row.shape.name, row.worker, row.sluice) for row in unexplained] == []


async def complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; a 503 is asked again, since on a busy machine a worker may miss its probes."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        for _ in range(RETRIES):
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 503:
                break
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_echoed_prompts_and_their_log_probabilities_are_the_workers_own(
    vllm_server: str, front: str
) -> None:
    prompts = ["Berserk was written by", "One Piece was written by"]
    asked = {"model": "base", "prompt": prompts, "echo": True, "temperature": 0}
    for fields in ({"logprobs": 1, "max_tokens": 1}, {"logprobs": 2, "max_tokens": 0}, {"max_tokens": 3}):
        worker, sluice = [await complete(url, {**asked, **fields}) for url in (vllm_server, front)]
        assert sluice["usage"]["completion_tokens"] == worker["usage"]["completion_tokens"]
        assert len(sluice["choices"]) == len(prompts)
        for own, passed_on in zip(worker["choices"], sluice["choices"], strict=True):
            assert passed_on["text"] == own["text"] and passed_on["text"].startswith(prompts[own["index"]])
            if "logprobs" in fields:
                own, passed_on = own["logprobs"], passed_on["logprobs"]
                assert passed_on["token_logprobs"][0] is None
                assert passed_on["token_logprobs"][1:] == pytest.approx(own["token_logprobs"][1:], abs=1e-3)
                assert (passed_on["tokens"], passed_on["text_offset"]) == (own["tokens"], own["text_offset"])


def test_the_shapes_are_many_and_each_has_a_name() -> None:
    names = [shape.name for shape in shapes("demo")]
    assert len(names) == len(set(names)) >= 150
    assert f"sends {len(names)} requests" in DOCUMENT.read_text(encoding="utf-8")
