"""Which adapter a request gets: a pure function of what was asked and of the route's rules."""

from __future__ import annotations

from adapters.values import Selection, SelectionRule

EXPLICIT = "explicit"
NONE = "none"


def choose(selection: Selection) -> tuple[str | None, str]:
    """The adapter's name (or an alias), ``None`` for the base model, and the rule that decided.

    In this order: the explicit wish (``explicit``); the first of the route's rules whose every field
    equals the request's (``rule[i]``, counted from 0); else the base model (``none``). A rule without
    conditions always matches; a field that the request lacks matches nothing.
    """
    if selection.adapter_id is not None:
        return selection.adapter_id, EXPLICIT
    for index, rule in enumerate(selection.rules):
        if _matches(rule, selection):
            return rule.adapter_id, f"rule[{index}]"
    return None, NONE


def _matches(rule: SelectionRule, selection: Selection) -> bool:
    return all(selection.fields.get(name) == wanted for name, wanted in rule.when.items())
