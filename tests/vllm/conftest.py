"""What the tests of vLLM share; those that break an engine start their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

needs_vllm = [
    pytest.mark.xdist_group("vllm"),
    # Half a minute for a start on a quiet machine, several minutes on a busy one.
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM's CPU build exists for Linux on x86-64 alone"
    ),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that use the shared engine go first: a host that stops ends every process of vLLM below this one."""

    def last(item: pytest.Item) -> bool:
        used = item.fixturenames if isinstance(item, pytest.Function) else ()
        return item.path.parent == Path(__file__).parent and "vllm" not in used and "vllm_server" not in used

    items.sort(key=last)
