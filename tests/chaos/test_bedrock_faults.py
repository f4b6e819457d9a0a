"""Hundreds of faulty Bedrock calls leave nothing, and none hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.bedrock_faults import AT_ONCE, FAULTS, measure, shown
from observability.logs import configure_logging
from ops.chaos.testbed import CREDENTIALS

pytestmark = pytest.mark.slow

CALLS = 300
# The bounds are 0.3 s and 3 s. A busy machine may stall for seconds; a call that hangs never ends.
GRACE_S = 20.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log: hundreds of failed calls write hundreds of lines."""
    logs = configure_logging("critical", json=False)
    yield
    logs.close()


@pytest.mark.timeout(600)
async def test_faulty_calls_end_in_time_in_the_closed_set_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    figures = await measure(CALLS, tmp_path, parts=3, grace_s=GRACE_S)
    table = shown(figures)
    assert sum(figures.ends.values()) == CALLS, table
    assert figures.late == 0, table
    assert figures.early == 0, table
    assert not any(figures.left.values()), table
    assert figures.threads[1] <= figures.threads[0] + 1 and figures.lane_threads <= AT_ONCE, table
    ends = {fault: {end for one, end in figures.ends if one == fault} for fault in FAULTS}
    # Possible if the stand-in itself was that slow: it shares the machine.
    slow = {"timeout", "timeout after text", "the caller's deadline"}
    assert ends["answers"] - slow == {"whole"}, table
    assert ends["throttled"] - slow == {"throttled"}, table
    assert all("whole" not in found for fault, found in ends.items() if fault != "answers"), table
    assert "timeout" in ends["hangs before its answer"], table
    assert table.startswith("| the stand-in |")
