from __future__ import annotations

from gateway.contracts.native_answer import budget_body
from gateway.contracts.values import BudgetReport

PLAIN = BudgetReport(1, 2, 3, 4, 5, dropped_chunks=("a",), dropped_turns=6)


def test_cut_merged_and_summarized_parts_are_reported_only_if_there_are_any() -> None:
    assert set(budget_body(PLAIN)) == {
        "system", "retrieval", "recent_turns", "older_summary", "generation_reserve", "dropped_chunks",
        "dropped_turns",
    }  # fmt: skip
    report = BudgetReport(1, 2, 3, 4, 5, cut_chunks=("b",), merged_chunks=("c", "d"), summarized_turns=6)
    body = budget_body(report)
    assert (body["cut_chunks"], body["merged_chunks"], body["summarized_turns"]) == (("b",), ("c", "d"), 6)
