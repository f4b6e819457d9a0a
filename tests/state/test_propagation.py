"""Real processes that follow one stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.state_propagation import measure


@pytest.mark.slow
def test_a_record_is_in_force_in_other_processes_soon(tmp_path: Path) -> None:
    result = measure(f"sqlite:///{tmp_path}/state.db", processes=2, appends=10, idle_s=0.5)
    assert 0 < result.p50_ms <= result.p99_ms < 5_000, "under 200 on a machine that does nothing else"
