"""Hundreds of faulty Bedrock calls leave nothing, and none is late."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.chaos.bedrock_faults import FAULTS, measure, shown
from gateway.chaos.rig import CREDENTIALS

CALLS = 300


@pytest.mark.timeout(120)
async def test_faulty_calls_end_in_time_in_the_closed_set_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    figures = await measure(CALLS, tmp_path)
    assert sum(figures.ends.values()) == CALLS
    assert figures.late == 0
    assert not any(figures.left.values()), figures.left
    assert figures.threads[1] <= figures.threads[0] + 1, "the default executor may have made one"
    ends = {fault: {end for one, end in figures.ends if one == fault} for fault in FAULTS}
    assert ends["answers"] <= {"whole", "the caller's deadline"}
    assert all("whole" not in found for fault, found in ends.items() if fault != "answers")
    assert ends["throttled"] <= {"throttled", "the caller's deadline"}
    assert "timeout" in ends["hangs before its answer"]
    assert shown(figures).startswith("| the stand-in |")
