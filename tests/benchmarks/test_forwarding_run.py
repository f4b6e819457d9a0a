"""The forwarding benchmark's whole run, with a load that any machine can take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.forwarding.gateways import Name
from benchmarks.forwarding.processes import Cores
from benchmarks.forwarding.report import summarize
from benchmarks.forwarding.rounds import LOADS, Plan, run_all


@pytest.mark.serial
@pytest.mark.parametrize("name", [Name.FASTAPI, Name.SLUICE, Name.SLUICE_UNSEEN])
def test_a_gateway_is_measured_and_every_answer_is_right(name: Name) -> None:
    gentle = {key: replace(load, amount=3) for key, load in LOADS.items()}
    told: list[str] = []
    plan = Plan([Name.DIRECT, name], rounds=1, seconds=1.0, warm_up_s=0.3, loads=gentle)
    direct, row = summarize(run_all(plan, Cores.here(), told.append))
    assert (direct.failed, row.failed) == (0, 0), (direct.faults, row.faults)
    assert row.cpu_ms is not None and row.flood_per_core is not None and row.rss_mib is not None
    assert len(told) == 2 * len(LOADS) and name in told[-1]
