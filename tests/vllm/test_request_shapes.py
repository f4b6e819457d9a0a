"""Sluice answers each request with vLLM's status, or the document says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.request_shapes import DOCUMENT, compare, gateway, reason_of, shapes
from tests.conformance.specimens import ADMIN_KEY

pytestmark = [pytest.mark.xdist_group("conformance-vllm-worker"), pytest.mark.slow]


async def test_every_status_that_differs_from_the_workers_has_a_reason(
    vllm_server: str, tmp_path: Path
) -> None:
    # vLLM 0.33 on the CPU crashes on prompt_logprobs when it is started with LoRA.
    asked = [shape for shape in shapes("base") if "prompt_logprobs" not in shape.name]
    server = gateway(vllm_server, tmp_path, ADMIN_KEY)
    try:
        await server.wait_ready("/ready")
        rows = await compare(asked, vllm_server, server.url, ADMIN_KEY)
    finally:
        server.close()
    assert [(row.shape.name, row.sluice) for row in rows if row.sluice >= 500] == []
    unexplained = [row for row in rows if row.worker != row.sluice and reason_of(row) is None]
    assert [(row.shape.name, row.worker, row.sluice) for row in unexplained] == []


def test_the_shapes_are_many_and_each_has_a_name() -> None:
    names = [shape.name for shape in shapes("demo")]
    assert len(names) == len(set(names)) >= 150
    assert f"sends {len(names)} requests" in DOCUMENT.read_text(encoding="utf-8")
