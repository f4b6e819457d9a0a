"""Reading GPUs with the driver's tool, as far as a machine without a GPU can test it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.health import gpus as gpu

pytestmark = pytest.mark.slow


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    return tmp_path / "tool"


def says(tool: Path, script: str) -> str:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


async def test_each_gpu_is_told_with_its_use_and_memory(tool: Path) -> None:
    found = await gpu.read_gpus(says(tool, "echo '0, 37, 71680, 81920'; echo '1, [N/A], 512, 81920'"))
    assert found == [
        {"index": 0.0, "utilization_pct": 37.0, "memory_used_gb": 70.0, "memory_total_gb": 80.0},
        {"index": 1.0, "utilization_pct": None, "memory_used_gb": 0.5, "memory_total_gb": 80.0},
    ]


async def test_a_machine_without_the_driver_has_none() -> None:
    assert await gpu.read_gpus("no-such-tool-here") == ()


async def test_a_tool_that_cannot_run_or_says_nonsense_is_no_fault_of_health(tool: Path) -> None:
    assert await gpu.read_gpus(says(tool, "echo 'NVIDIA-SMI has failed'; exit 9")) == []
    assert await gpu.read_gpus(says(tool, "exit 1").replace("tool", ".")) == ()
