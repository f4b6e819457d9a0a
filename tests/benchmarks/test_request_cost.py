"""What a request costs, in Python calls, timers and tasks: no more than the committed budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.request_cost.__main__ import BUDGET, Kind, budget_of

# Allowed growth of the sum of the calls, which differs by less than 1 % between runs.
ALLOWED_GROWTH = 1.05
# Allowed extra timers and tasks: they depend a little on how requests and the ledger's batches meet.
ALLOWED_MORE = 2.0
# A busy machine only adds to the cost: requests that wait cause more timers and batches. One good run is enough.
RUNS = 3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", Kind)
def test_a_request_costs_no_more_than_its_budget(kind: Kind) -> None:
    budget = json.loads(BUDGET.read_text())[kind]
    for last in (False,) * (RUNS - 1) + (True,):
        excess = above(budget, budget_of(kind))
        if not excess or last:
            break
    assert not excess, excess


def above(budget: dict[str, Any], cost: dict[str, Any]) -> list[str]:
    """Return the parts of a run's cost that exceed the budget."""
    grown = {
        room: f"{budget['calls'].get(room, 0):g} -> {calls:g}"
        for room, calls in cost["calls"].items()
        if calls > budget["calls"].get(room, 0)
    }
    spent, allowed = sum(cost["calls"].values()), sum(budget["calls"].values()) * ALLOWED_GROWTH
    calls = (
        f"{spent:g} calls a request, {allowed:g} allowed; the rooms that grew: {grown}; "
        "where that is wanted: python -m benchmarks.request_cost --write"
    )
    asked = [
        f"{what}: {cost['asked'][what]:g}, {budget['asked'][what] + ALLOWED_MORE:g} allowed"
        for what in ("timers", "tasks")
        if cost["asked"].get(what, 0) > budget["asked"].get(what, 0) + ALLOWED_MORE
    ]
    return [calls, *asked] if spent > allowed else asked
