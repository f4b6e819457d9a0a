"""The benchmark of an engine whose speed differs from the one that its targets were set for."""

from __future__ import annotations

import random

import pytest

from benchmarks.admission_pace import ENGINES, SHAPE, TRACE, Speed, SpeedChange, row_of, stretch
from evaluation.simulator.workload import requests_of
from ops.replay.trace import read_trace


def test_each_way_changes_how_long_a_step_takes() -> None:
    speeds = {way: Speed(way, random.Random(1)) for way in SpeedChange}
    steps = {way: [speed.takes(0.01) for _ in range(4000)] for way, speed in speeds.items()}
    assert set(steps[SpeedChange.STEADY]) == {0.01}
    assert steps[SpeedChange.SLOW] == pytest.approx([0.018] * 4000)
    assert [steps[SpeedChange.TURNS][0], steps[SpeedChange.TURNS][-1]] == pytest.approx([0.01, 0.017])
    assert 0.01 <= min(steps[SpeedChange.WANDERS]) < max(steps[SpeedChange.WANDERS]) <= 0.02
    assert len(set(steps[SpeedChange.WANDERS])) < 60, "a speed lasts for seconds"
    stalled = [step for step in steps[SpeedChange.STALLS] if step > 0.03]
    assert 20 < len(stalled) < 80


def test_the_overload_comes_after_a_quiet_beginning() -> None:
    arrivals, quiet = stretch(requests_of(read_trace(TRACE), SHAPE), 0, 2.0)
    before, after = arrivals[:quiet], arrivals[quiet:]
    assert before[-1].at < after[0].at
    slow, fast = quiet / before[-1].at, len(after) / (after[-1].at - after[0].at)
    assert fast == pytest.approx(2.0 / 0.6 * slow, rel=0.05)


@pytest.mark.slow
def test_on_a_machine_that_has_become_slower_little_is_wasted() -> None:
    whole = requests_of(read_trace(TRACE), SHAPE)
    row = row_of("embedded", SpeedChange.SLOW, 2.0, whole)
    assert row.wasted < 0.02 and row.goodput > 5.0, "without the pace of those in flight 12 % are wasted"
    assert set(ENGINES) == {"embedded", "vllm"}
