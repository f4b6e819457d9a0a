"""One vLLM in process for the tests that only ask it; those that break it start their own."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.harness import Specimen, in_one_task
from tests.conformance.vllm_in_process import vllm_in_process

needs_vllm = [
    pytest.mark.xdist_group("vllm"),
    # Half a minute for a start on a quiet machine, several minutes on a busy one.
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build exists for Linux on x86-64 alone"
    ),
]


@pytest.fixture(scope="session")
def adapters_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-adapters")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(adapters_folder: Path) -> AsyncIterator[Specimen]:
    async with in_one_task(vllm_in_process(adapters_folder)) as running:
        yield running
