"""Common kinds of chat templates, and conversations in the planner's order of messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgeting.counting import ChatTokenizer
from budgeting.errors import TemplateRefused
from budgeting.forms import SystemMessageSupport, learn_system_support
from budgeting.plan import BudgetPlanner
from budgeting.template import ChatTemplate
from budgeting.values import BudgetRequest, CanonicalPrompt, EvidenceChunk, Message, Role, SectionBudgets
from tests.budgeting import folders

SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT

# One system message at most, in front of the first turn; then user and assistant in turns.
ONE_SYSTEM = folders.ALTERNATING

# No system message at all; the assistant is called `model`.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)

# Renders a leading system message and silently omits any later one.
SILENT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}<|start|>system\n{{ messages[0].content }}<|eot|>"
    "{% endif %}{% for m in messages %}{% if m.role != 'system' %}<|start|>{{ m.role }}\n{{ m.content }}<|eot|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

# Every message by its role, at any position; a default text unless the first is a system message.
WITH_DEFAULT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|start|>system\nBe helpful.<|eot|>\n"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

FORMS = {
    "by role": (folders.CHATML, SystemMessageSupport()),
    "by role, contents trimmed": (folders.HEADERS, SystemMessageSupport()),
    "by role, with a default": (WITH_DEFAULT, SystemMessageSupport()),
    "one system message, alternating": (ONE_SYSTEM, SystemMessageSupport(several=False, later=False)),
    "no system message, alternating": (
        NO_SYSTEM,
        SystemMessageSupport(leading=False, several=False, later=False),
    ),
    "later ones dropped in silence": (SILENT, SystemMessageSupport(several=False, later=False)),
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

TALK = (
    Message(SYSTEM, "You sell manga."),
    Message(SYSTEM, "Speak French."),
    Message(USER, "hi"),
    Message(ASSISTANT, "hello"),
    Message(SYSTEM, "Evidence:\n[catalog m1] Berserk"),
    Message(USER, "which one?"),
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIALS, now=lambda: datetime(2026, 11, 20))


def form_of(source: str) -> SystemMessageSupport:
    return learn_system_support(
        lambda messages: template(source).render(messages, add_generation_prompt=False)
    )


@pytest.mark.parametrize(("source", "form"), FORMS.values(), ids=FORMS.keys())
def test_the_form_that_a_template_accepts_is_found_by_trying(source: str, form: SystemMessageSupport) -> None:
    assert form_of(source) == form


@pytest.mark.parametrize(("source", "form"), FORMS.values(), ids=FORMS.keys())
def test_every_template_shows_every_text_of_our_order_in_its_place(
    source: str, form: SystemMessageSupport
) -> None:
    rendered = template(source).render(form.fold(TALK), add_generation_prompt=True)
    places = [rendered.index(message.content) for message in TALK]
    assert places == sorted(places)


def test_a_conversation_that_the_template_accepts_is_not_changed() -> None:
    assert SystemMessageSupport().fold(TALK) is TALK
    plain = (Message(SYSTEM, "a"), Message(USER, "b"))
    assert SystemMessageSupport(several=False, later=False).fold(plain) is plain


def test_several_system_messages_become_one_and_the_evidence_opens_the_latest_turn_marked() -> None:
    assert SystemMessageSupport(several=False, later=False).fold(TALK) == (
        Message(SYSTEM, "You sell manga.\n\nSpeak French."),
        Message(USER, "hi"),
        Message(ASSISTANT, "hello"),
        Message(USER, "Evidence:\n[catalog m1] Berserk\n\nMessage:\nwhich one?"),
    )


def test_without_a_system_role_the_system_text_opens_the_first_turn() -> None:
    form = SystemMessageSupport(leading=False, several=False, later=False)
    first, *_, last = form.fold(TALK)
    assert first == Message(USER, "You sell manga.\n\nSpeak French.\n\nMessage:\nhi")
    assert last == Message(USER, "Evidence:\n[catalog m1] Berserk\n\nMessage:\nwhich one?")
    # The first turn stays the same when more turns follow, so a cached prefix stays valid.
    assert form.fold(TALK[:3])[0] == first


def test_a_template_that_accepts_no_known_form_refuses_the_unchanged_conversation() -> None:
    source = "{{ raise_exception('three roles or none') }}"
    assert form_of(source) == SystemMessageSupport()
    with pytest.raises(TemplateRefused):
        template(source).render(TALK, add_generation_prompt=True)


def test_turns_of_the_caller_that_do_not_alternate_are_still_refused() -> None:
    form = form_of(ONE_SYSTEM)
    with pytest.raises(TemplateRefused, match="alternate"):
        template(ONE_SYSTEM).render(
            form.fold((Message(USER, "a"), Message(USER, "b"))), add_generation_prompt=True
        )


forms = st.builds(SystemMessageSupport, st.booleans(), st.booleans(), st.booleans())


@given(form=forms, roles=st.lists(st.sampled_from(list(Role)), max_size=8))
def test_folding_loses_no_text_and_every_turn_ends_with_the_callers_own_words(
    form: SystemMessageSupport, roles: list[Role]
) -> None:
    messages = [Message(role, f"<{number}>") for number, role in enumerate([*roles, USER])]
    folded = form.fold(messages)
    assert form.fold(folded) == folded
    text = "".join(one.content for one in folded)
    assert all(text.count(message.content) == 1 for message in messages)
    turns = [one for one in messages if one.role is not SYSTEM]
    others = [one for one in folded if one.role is not SYSTEM]
    assert [one.role for one in others] == [one.role for one in turns]
    assert all(now.content.endswith(was.content) for now, was in zip(others, turns, strict=True))


SHAPES = {"one system": ONE_SYSTEM, "no system": NO_SYSTEM, "silent": SILENT}


@pytest.fixture(scope="module", params=SHAPES)
def planner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BudgetPlanner:
    specials = ["<s>", "</s>", "<|start|>", "<|eot|>"]
    folder = folders.write_folder(
        tmp_path_factory.mktemp("form"),
        folders.byte_level(specials),
        SHAPES[request.param],
        bos_token="<s>",
        eos_token="</s>",
    )
    return BudgetPlanner(ChatTokenizer(folder), max_model_len=400)


def prompt(
    *, context: str = "", turns: Sequence[Message] = (Message(USER, "which one?"),)
) -> CanonicalPrompt:
    return CanonicalPrompt(
        system=("You sell manga.", "Speak French."),
        turns=(Message(USER, "hi"), Message(ASSISTANT, "hello"), *turns),
        evidence=(EvidenceChunk("m1", "catalog", "Berserk, in stock."),),
        context=context,
    )


def test_evidence_and_context_reach_a_model_that_knows_no_later_system_message(
    planner: BudgetPlanner,
) -> None:
    plan = planner.plan(BudgetRequest(prompt(context="time: 10:00")))
    assert [one.role for one in plan.messages[-3:]] == [USER, ASSISTANT, USER]
    assert "[catalog m1] Berserk" in plan.messages[-1].content
    assert plan.messages[-1].content.endswith("time: 10:00\n\nMessage:\nwhich one?")
    assert plan.counts.retrieval > 0 and plan.counts.system > 0
    assert plan.counts.total == len(plan.token_ids)


@settings(deadline=None)
@given(one=st.text(max_size=20), two=st.text(max_size=20))
def test_a_changed_context_changes_no_token_before_the_boundary(
    planner: BudgetPlanner, one: str, two: str
) -> None:
    a, b = (planner.plan(BudgetRequest(prompt(context=f"x: {text}"))) for text in (one, two))
    assert a.prefix_tokens == b.prefix_tokens > 0
    assert a.token_ids[: a.prefix_tokens] == b.token_ids[: b.prefix_tokens]


def test_evidence_opens_the_latest_turn_even_when_no_turn_stands_before_it(planner: BudgetPlanner) -> None:
    chunk = EvidenceChunk("m1", "catalog", "Berserk")
    first = CanonicalPrompt(system=("Be brief.",), turns=(Message(USER, "hi"),), evidence=(chunk,))
    plan = planner.plan(BudgetRequest(first))
    assert plan.messages[-1].content.endswith("Evidence:\n[catalog m1] Berserk\n\nMessage:\nhi")


def test_too_much_evidence_is_still_dropped_whole(planner: BudgetPlanner) -> None:
    chunks = tuple(
        EvidenceChunk(f"m{n}", "catalog", f"volume {n} of Vinland Saga " * 12, float(n)) for n in range(9)
    )
    big = CanonicalPrompt(system=("You sell manga.",), turns=(Message(USER, "which one?"),), evidence=chunks)
    plan = planner.plan(BudgetRequest(big, budgets=SectionBudgets()))
    assert plan.dropped_chunks and "m8" not in plan.dropped_chunks
    assert plan.counts.total + plan.generation_reserve <= 400
