from __future__ import annotations

import pytest

from budgeting.values import SPARE_ORDER, CanonicalPrompt, PromptSection, SectionBudgets, SummaryKind
from gateway.prompts.budgets import budget_request
from gateway.prompts.versions import PromptVersion
from gateway.routing.check import KnownNames
from gateway.routing.revision import RoutingFileError, make_revision
from gateway.routing.route_budgets import RouteBudgets

PROMPT = CanonicalPrompt(system=("S",))
VERSION = PromptVersion(
    id="v",
    system="S",
    budgets=SectionBudgets(retrieval=900, recent_turns=500),
    reserve=700,
    summarizer=SummaryKind.ENGINE,
)


def route(**config: object) -> RouteBudgets:
    whole = {"routes": {"r": {"backends": [{"name": "b"}], "fallback": [], **config}}}
    return make_revision(1, whole, KnownNames(["b"], [], [])).routes["r"].budgets


def test_without_a_version_and_a_route_the_defaults_hold() -> None:
    asked = budget_request(PROMPT, max_tokens=None, version=None)
    assert (asked.budgets, asked.reserve, asked.spare) == (SectionBudgets(), None, SPARE_ORDER)
    assert asked.summary is SummaryKind.EXTRACTIVE


def test_the_version_says_what_the_route_does_not() -> None:
    asked = budget_request(PROMPT, max_tokens=5, version=VERSION, route=route())
    assert (asked.budgets, asked.reserve, asked.max_tokens) == (VERSION.budgets, 700, 5)
    assert asked.summary is SummaryKind.ENGINE


def test_the_route_wins_key_by_key() -> None:
    said = route(budgets={"retrieval": 0, "older_summary": 50}, reserve=100, spare=["recent_turns"])
    asked = budget_request(PROMPT, max_tokens=None, version=VERSION, route=said)
    assert asked.budgets == SectionBudgets(system=400, retrieval=0, recent_turns=500, older_summary=50)
    assert (asked.reserve, asked.spare) == (100, (PromptSection.RECENT_TURNS,))
    assert budget_request(PROMPT, max_tokens=None, version=None, route=said).budgets.recent_turns == 1200


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"budgets": {"retrieval": -1}}, "budgets.retrieval"),
        ({"budgets": {"evidence": 5}}, "budgets.evidence"),
        ({"reserve": 0}, "reserve"),
        ({"spare": ["system"]}, "spare"),
    ],
)
def test_a_wrong_budget_of_a_route_is_named(config: dict[str, object], named: str) -> None:
    with pytest.raises(RoutingFileError, match=named):
        route(**config)
