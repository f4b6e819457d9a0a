"""Selection: the adapter that the request names, else the route's first matching rule, else the base model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalogue import AdapterState, Alias
from adapters.errors import AdapterForbidden, UnknownAdapter
from adapters.selection import AdapterOffer, Lease, choose, select, stable_fraction
from adapters.values import Adapter, Selection, SelectionRule

RULES = (
    SelectionRule({"locale": "ja"}, "jp_style_v1"),
    SelectionRule({"intent": "manga_recommendation"}, "manga_domain_v3"),
)


def test_an_explicit_wish_wins_over_rules() -> None:
    assert choose(Selection("mine", RULES, {"locale": "ja"})) == ("mine", "explicit")


def test_the_first_matching_rule_decides() -> None:
    both = {"locale": "ja", "intent": "manga_recommendation"}
    assert choose(Selection(None, RULES, both)) == ("jp_style_v1", "rule[0]")
    assert choose(Selection(None, RULES, {**both, "locale": "en"})) == ("manga_domain_v3", "rule[1]")


def test_without_a_match_it_is_the_base_model() -> None:
    assert choose(Selection(None, RULES, {"locale": "en"})) == (None, "none")
    assert choose(Selection(None)) == (None, "none")


def test_a_rule_needs_every_one_of_its_fields() -> None:
    rules = (SelectionRule({"locale": "ja", "intent": "x"}, "a"),)
    assert choose(Selection(None, rules, {"locale": "ja"})) == (None, "none")
    assert choose(Selection(None, rules, {"locale": "ja", "intent": "x"})) == ("a", "rule[0]")


def test_a_rule_without_conditions_is_the_routes_default() -> None:
    assert choose(Selection(None, (*RULES, SelectionRule({}, "general")), {})) == ("general", "rule[2]")


names = st.sampled_from(["locale", "intent", "tenant"])
fields = st.dictionaries(names, st.sampled_from(["a", "b"]))


@given(
    wish=st.none() | st.text(max_size=3),
    rules=st.lists(st.builds(SelectionRule, fields, st.text(max_size=3)), max_size=4),
    given_fields=fields,
)
def test_a_choice_names_the_first_rule_that_the_request_satisfies(
    wish: str | None, rules: list[SelectionRule], given_fields: dict[str, str]
) -> None:
    chosen, rule = choose(Selection(wish, tuple(rules), given_fields))
    satisfied = [index for index, one in enumerate(rules) if one.when.items() <= given_fields.items()]
    if wish is not None:
        assert (chosen, rule) == (wish, "explicit")
    elif satisfied:
        assert (chosen, rule) == (rules[satisfied[0]].adapter_id, f"rule[{satisfied[0]}]")
    else:
        assert (chosen, rule) == (None, "none")


V1, V2 = Adapter("v1", 1, "demo", "p1", {"kind": "x"}), Adapter("v2", 2, "demo", "p2", {"kind": "x"})
OLD, NEW = Adapter("old", 3, "demo", "p3"), Adapter("new", 4, "demo", "p4")
OFFER = AdapterOffer(
    adapters={one.adapter_id: one for one in (V1, V2, OLD, NEW)},
    states={
        "v1": AdapterState.ACTIVE,
        "v2": AdapterState.CANARY,
        "old": AdapterState.RETIRED,
        "new": AdapterState.STAGED,
    },
    aliases={"style": Alias("style", "v1", "v2", 25.0), "early": Alias("early", None, "v2", 10.0)},
    refused={"bad": "not_finite: NaN"},
)


def test_an_alias_gives_its_canary_the_share_that_was_asked_and_says_so() -> None:
    chosen = [select(Selection("style", sticky_key=f"s{n}"), OFFER) for n in range(2_000)]
    canary = [one for one in chosen if one.adapter is V2]
    assert {one.rule for one in canary} == {"canary(25%)"}
    assert {one.rule for one in chosen if one.adapter is V1} == {"explicit"}
    assert 0.2 < len(canary) / len(chosen) < 0.3


@given(st.text(max_size=20), st.floats(0, 100), st.floats(0, 100))
def test_a_session_stays_on_the_canary_while_its_share_grows(key: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    at = stable_fraction("style", key)
    if Alias("style", "v1", "v2", small).resolve(at) == "v2":
        assert Alias("style", "v1", "v2", large).resolve(at) == "v2"


def test_each_alias_has_an_order_of_its_own() -> None:
    keys = [f"s{n}" for n in range(2_000)]
    both = sum(stable_fraction("a", key) < 0.1 and stable_fraction("b", key) < 0.1 for key in keys)
    assert both < 60  # about 20 if independent


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("old", "is retired"),
        ("new", "is staged"),
        ("bad", r"was refused \(operators are told why\)"),
        ("nobody", "is not registered; known: early, style, v1, v2"),
    ],
)
def test_what_is_not_served_is_unknown_and_told_why(wish: str, why: str) -> None:
    with pytest.raises(UnknownAdapter, match=why):
        select(Selection(wish), OFFER)


def test_operators_are_told_why_an_adapter_was_refused() -> None:
    with pytest.raises(UnknownAdapter, match=r"was refused \(not_finite: NaN\)"):
        select(Selection("bad", operator=True), OFFER)


def test_a_key_is_told_of_none_that_it_may_not_use() -> None:
    with pytest.raises(UnknownAdapter, match=r"'new' is staged.*; known: v2$"):
        select(Selection("new", allowed=("new", "v2")), OFFER)


def test_a_staged_version_is_for_operators_who_name_it_and_a_retired_one_for_nobody() -> None:
    assert select(Selection("new", operator=True), OFFER).adapter is NEW
    with pytest.raises(UnknownAdapter):
        select(Selection("old", operator=True), OFFER)


@pytest.mark.parametrize(("name", "allowed"), [("old", None), ("bad", None), ("new", None), ("v1", ("v2",))])
def test_the_base_model_may_replace_an_unserved_adapter_of_a_rule_but_not_one_that_is_named(
    name: str, allowed: tuple[str, ...] | None
) -> None:
    rules = (SelectionRule({}, name),)
    chosen = select(Selection(None, rules, allowed=allowed, or_base=True), OFFER)
    assert chosen == Lease(None, "rule[0]", missing=name)
    for refused in (Selection(None, rules, allowed=allowed), Selection(name, allowed=allowed, or_base=True)):
        with pytest.raises((UnknownAdapter, AdapterForbidden)):
            select(refused, OFFER)


def test_an_alias_that_has_only_a_canary_serves_only_its_sessions() -> None:
    keys = [f"s{n}" for n in range(200)]
    served = [key for key in keys if stable_fraction("early", key) < 0.1]
    assert served
    for key in keys:
        if key in served:
            assert select(Selection("early", sticky_key=key), OFFER) == Lease(V2, "canary(10%)")
        else:
            with pytest.raises(UnknownAdapter, match="no version for all sessions yet"):
                select(Selection("early", sticky_key=key), OFFER)


def test_a_key_limited_to_some_adapters_may_use_these_by_name_or_alias_and_no_others() -> None:
    assert select(Selection("style", sticky_key="s", allowed=("style",)), OFFER).adapter is not None
    assert select(Selection("v1", allowed=("v1",)), OFFER).adapter is V1
    assert select(Selection(None, allowed=()), OFFER).adapter is None
    for wish, allowed in (("v2", ("v1",)), ("v1", ("style",)), ("v1", ())):
        with pytest.raises(AdapterForbidden, match=f"may not use adapter '{wish}'"):
            select(Selection(wish, allowed=allowed), OFFER)


def test_a_rule_by_labels_leads_to_the_newest_active_version_that_has_them_all() -> None:
    def offer(second: AdapterState) -> AdapterOffer:
        return AdapterOffer({"v1": V1, "v2": V2}, {"v1": AdapterState.ACTIVE, "v2": second})

    rule = SelectionRule({}, None, {"kind": "x"})
    assert select(Selection(None, (rule,)), offer(AdapterState.STAGED)) == Lease(V1, "rule[0]")
    assert select(Selection(None, (rule,)), offer(AdapterState.ACTIVE)) == Lease(V2, "rule[0]")
    nobody = SelectionRule({}, None, {"kind": "y"})
    assert select(Selection(None, (nobody,)), offer(AdapterState.ACTIVE)) == Lease(None, "none")
