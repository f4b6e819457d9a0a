"""The forwarding benchmark's whole run, with a load that any machine can take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.forwarding.gateways import Name
from benchmarks.forwarding.processes import Cores
from benchmarks.forwarding.report import summarize
from benchmarks.forwarding.rounds import LOADS, Plan, run_all

pytestmark = pytest.mark.slow
# No `taskset`: the processes are forked.
ANY_CORE = Cores((), (), ())


def test_every_gateway_is_measured_and_every_answer_is_right() -> None:
    gentle = {key: replace(load, amount=3, step_ms=min(load.step_ms, 1.0)) for key, load in LOADS.items()}
    progress: list[str] = []
    names = [Name.DIRECT, Name.FASTAPI, Name.SLUICE, Name.SLUICE_UNSEEN]
    # On a busy machine the gateways may use too little CPU in the shorter time to measure it.
    for seconds in (0.3, 1.0, 3.0):
        progress.clear()
        plan = Plan(names, rounds=1, seconds=seconds, warm_up_s=0.1, loads=gentle)
        direct, *rows = summarize(run_all(plan, ANY_CORE, progress.append))
        if all(row.cpu_ms is not None and row.flood_per_core is not None for row in rows):
            break
    assert direct.failed == 0, direct.faults
    for row in rows:
        assert row.failed == 0, row.faults
        assert row.cpu_ms is not None and row.flood_per_core is not None and row.rss_mib is not None
    assert len(rows) == 3 and len(progress) == len(names) * len(LOADS) and names[-1] in progress[-1]
