"""Marks and order of the tests of vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

needs_vllm = [
    pytest.mark.xdist_group("vllm"),
    # A start takes half a minute on a quiet machine, several minutes on a busy one.
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build exists for Linux on x86-64 alone"
    ),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests: users of the shared engine, the test that kills it, then tests with their own engine.

    A host that stops ends every process of vLLM below the test process.
    """

    def place(item: pytest.Item) -> int:
        used = item.fixturenames if isinstance(item, pytest.Function) else ()
        if item.path.parent != Path(__file__).parent or "vllm" in used or "vllm_server" in used:
            return 0
        return 1 if "running_vllm" in used else 2

    items.sort(key=place)
