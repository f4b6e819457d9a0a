"""Selection: the explicit wish, then the route's rules in order, then the base model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapters.selection import choose
from adapters.values import Selection, SelectionRule

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
