from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.contracts.answer import BudgetReport
from gateway.contracts.native_answer import answer_report
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.testing import answer_for

REQUEST = GenerateRequest("r", "g", Caller("shop", CallerRole.CALLER, "k"), 0.0, 0, contract=Contract.NATIVE)


def shown(budget: BudgetReport) -> Mapping[str, Any]:
    found: Mapping[str, Any] = answer_report(answer_for(REQUEST, "Hi", budget=budget))["budget"]
    return found


def test_cut_merged_and_summarized_parts_are_reported_only_if_there_are_any() -> None:
    assert shown(BudgetReport(1, 2, 3, 4, 5, (), 0)) == {
        "system": 1, "retrieval": 2, "recent_turns": 3, "older_summary": 4, "generation_reserve": 5,
        "dropped_chunks": (), "dropped_turns": 0,
    }  # fmt: skip
    body = shown(BudgetReport(1, 2, 3, 4, 5, ("a",), 6, ("b",), ("c", "d"), 7, 8))
    assert (body["dropped_chunks"], body["dropped_turns"]) == (("a",), 6)
    assert (body["cut_chunks"], body["merged_chunks"]) == (("b",), ("c", "d"))
    assert (body["summarized_turns"], body["tools"]) == (7, 8)
