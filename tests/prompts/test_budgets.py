from __future__ import annotations

import pytest

from budgeting.values import (
    SPARE_ORDER,
    BudgetRequest,
    CanonicalPrompt,
    PromptSection,
    SectionBudgets,
    SummaryKind,
)
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest, Sampling
from gateway.prompts.budgets import TRUNCATED, budget_request
from gateway.prompts.versions import PromptVersion
from gateway.routing.check import KnownNames
from gateway.routing.revision import Route, RoutingFileError, make_revision

PROMPT = CanonicalPrompt(system=("S",))


def asked_for(
    version: PromptVersion | None,
    said: Route | None = None,
    *,
    contract: Contract = Contract.NATIVE,
    max_tokens: int | None = None,
    truncate: bool = False,
) -> BudgetRequest:
    request = GenerateRequest(
        request_id="r",
        generation_id="g",
        contract=contract,
        caller=Caller("tenant", CallerRole.CALLER, "key"),
        arrived_at=0.0,
        created=0,
        messages=(),
        sampling=Sampling(max_tokens=max_tokens),
        truncate=truncate,
    )
    return budget_request(request, PROMPT, version, said or route())


VERSION = PromptVersion(
    id="v",
    system="S",
    budgets=SectionBudgets(retrieval=900, recent_turns=500),
    reserve=700,
    summarizer=SummaryKind.ENGINE,
)


def route(**config: object) -> Route:
    whole = {"routes": {"r": {"backends": [{"name": "b"}], "fallback": [], **config}}}
    return make_revision(1, whole, KnownNames(["b"], [], [])).routes["r"]


def test_without_a_version_and_a_route_nothing_is_trimmed() -> None:
    asked = asked_for(None)
    assert (asked.budgets, asked.reserve, asked.spare) == (None, None, SPARE_ORDER)
    assert asked.summary is SummaryKind.EXTRACTIVE
    assert asked_for(PromptVersion(id="v", system="S")).budgets is None


def test_the_prompt_version_applies_where_the_route_sets_nothing() -> None:
    asked = asked_for(VERSION, route(), max_tokens=5)
    assert (asked.budgets, asked.reserve, asked.max_tokens) == (VERSION.budgets, 700, 5)
    assert asked.summary is SummaryKind.ENGINE


def test_the_routes_longest_prompt_is_that_of_its_admission_limits() -> None:
    assert asked_for(VERSION).max_input_tokens is None
    assert asked_for(VERSION, route(admission={"max_input_tokens": 70})).max_input_tokens == 70


def test_the_route_wins_key_by_key() -> None:
    said = route(budgets={"retrieval": 0, "older_summary": 50}, reserve=100, spare=["recent_turns"])
    asked = asked_for(VERSION, said)
    assert asked.budgets == SectionBudgets(system=400, retrieval=0, recent_turns=500, older_summary=50)
    assert (asked.reserve, asked.spare) == (100, (PromptSection.RECENT_TURNS,))
    alone = asked_for(None, said).budgets
    assert alone is not None and alone.recent_turns == 1200


@pytest.mark.parametrize("contract", [Contract.CHAT, Contract.COMPLETIONS])
def test_budgets_trim_on_openais_paths_only_where_the_route_says_so(contract: Contract) -> None:
    budgets = {"retrieval": 7}
    assert asked_for(VERSION, route(budgets=budgets), contract=contract).budgets is None
    said = route(budgets=budgets, trim_in=["openai"])
    assert asked_for(None, said, contract=contract).budgets == SectionBudgets(retrieval=7)
    assert asked_for(None, said).budgets is None


def test_a_caller_who_asks_for_truncation_gets_the_routes_budgets_or_the_models_length() -> None:
    said = route(budgets={"retrieval": 7})
    assert asked_for(None, said, contract=Contract.CHAT, truncate=True).budgets == SectionBudgets(retrieval=7)
    assert asked_for(None, contract=Contract.CHAT, truncate=True).budgets == TRUNCATED


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"budgets": {"retrieval": -1}}, "budgets.retrieval"),
        ({"budgets": {"evidence": 5}}, "budgets.evidence"),
        ({"reserve": 0}, "reserve"),
        ({"spare": ["system"]}, "spare"),
        ({"trim_in": ["chat"]}, "trim_in"),
    ],
)
def test_a_wrong_budget_of_a_route_is_named(config: dict[str, object], named: str) -> None:
    with pytest.raises(RoutingFileError, match=named):
        route(**config)
