"""Reasoning efforts that a chat template refuses, for callers whose effort is only a hint."""

from __future__ import annotations

import asyncio

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.errors import TemplateRefused
from budgeting.values import BudgetRequest, CanonicalPrompt, Message, Plan, Role
from gateway.prompts.budgets import Planning, nearest_efforts
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import Models, ModelText
from tests.budgeting.folders import byte_level, write_folder

# Accepts three efforts, as some models' templates do, and only user turns.
TEMPLATE = """
{%- if reasoning_effort not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('no such effort') }}{% endif %}
{%- for message in messages %}
{%- if message.role != 'user' %}{{ raise_exception('users only') }}{% endif %}
{{- '<s>' + message.content + reasoning_effort }}
{%- endfor %}"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = write_folder(tmp_path_factory.mktemp("efforts") / "model", byte_level(["<s>"]), TEMPLATE)
    return ModelText(ChatTokenizer(folder), 512, Canonicalizer())


def planned(text: ModelText, effort: str, *, role: Role = Role.USER, lenient: bool = True) -> Plan:
    prompt = CanonicalPrompt(turns=(Message(role, "Hi"),), template_kwargs={"reasoning_effort": effort})
    asked = BudgetRequest(prompt, max_tokens=8, lenient=lenient)
    return asyncio.run(Planning(Models(text), asked, asyncio.to_thread).plan("any"))


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("low", None),
        ("xhigh", None),
        ("high", "medium"),
        ("max", "xhigh"),
        ("minimal", "low"),
        ("none", "low"),
    ],
)
def test_a_refused_effort_is_replaced_by_the_nearest_accepted_one(
    text: ModelText, asked: str, taken: str | None
) -> None:
    for _ in range(2):  # the second time the accepted effort is known
        plan = planned(text, asked)
        assert plan.reasoning_effort == taken
        assert plan.token_ids == planned(text, taken or asked).token_ids
    assert text.efforts.get(asked) == taken


def test_other_refusals_and_other_contracts_are_refused_as_before(text: ModelText) -> None:
    with pytest.raises(TemplateRefused, match="no such effort"):
        planned(text, "high", lenient=False)
    with pytest.raises(TemplateRefused, match="users only"):
        planned(text, "low", role=Role.ASSISTANT)
    with pytest.raises(TemplateRefused, match="no such effort"):
        planned(text, "unheard of")


def test_an_effort_is_never_replaced_by_none() -> None:
    assert nearest_efforts("minimal") == ["low", "medium", "high", "xhigh", "max"]
