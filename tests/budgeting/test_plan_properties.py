"""Properties of every plan, for any conversation, script, tokenizer and budget.

Drawing a conversation takes eight times as long as planning it, so each is planned with every tokenizer.
"""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from budgeting.counting import ChatTokenizer
from budgeting.duplicates import same_text
from budgeting.errors import ContextTooLong
from budgeting.plan import BudgetPlanner
from budgeting.sections import SUMMARY_TITLE, latest_turn
from budgeting.template import GENERATES
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    EvidenceChunk,
    Message,
    Plan,
    Role,
    SectionBudgets,
)
from tests.budgeting import strategies
from tests.budgeting.conftest import CHAT_KINDS

Tokenizers = dict[str, ChatTokenizer]
rooms = st.integers(1, 400)
thorough = strategies.examples(60)


def planned(
    tokenizer: ChatTokenizer, prompt: CanonicalPrompt, room: int, budgets: SectionBudgets
) -> Plan | None:
    planner = BudgetPlanner(tokenizer, max_model_len=room + 16)
    try:
        return planner.plan(BudgetRequest(prompt, max_tokens=16, budgets=budgets))
    except ContextTooLong as error:
        assert error.needed > error.allowed == room
        return None


def each(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, room: int, budgets: SectionBudgets
) -> list[tuple[str, ChatTokenizer, Plan]]:
    """Kind, tokenizer and plan of each tokenizer with which the prompt fits; rejects an example with none."""
    plans = [(kind, planned(tokenizers[kind], prompt, room, budgets)) for kind in CHAT_KINDS]
    fitting = [(kind, tokenizers[kind], plan) for kind, plan in plans if plan is not None]
    assume(fitting)
    return fitting


@thorough
@given(prompt=strategies.prompts(), room=rooms, budgets=strategies.budgets)
def test_a_plan_never_exceeds_the_model_and_its_counts_add_up(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, room: int, budgets: SectionBudgets
) -> None:
    for kind, tokenizer, plan in each(tokenizers, prompt, room, budgets):
        assert plan.counts.total + plan.generation_reserve <= room + 16, kind
        assert plan.counts.total == len(plan.token_ids), kind
        assert min(plan.counts.system, plan.counts.retrieval, plan.counts.recent_turns) >= 0, kind
        assert plan.token_ids == tokenizer.encode_chat(plan.messages), kind


@thorough
@given(prompt=strategies.prompts(), room=rooms, budgets=strategies.budgets)
def test_every_part_of_the_prompt_is_sent_or_reported_as_dropped(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, room: int, budgets: SectionBudgets
) -> None:
    for _, _, plan in each(tokenizers, prompt, room, budgets):
        is_sent_or_dropped(prompt, plan, budgets)


def is_sent_or_dropped(prompt: CanonicalPrompt, plan: Plan, budgets: SectionBudgets) -> None:
    system = [m.content for m in plan.messages if m.role is Role.SYSTEM]
    assert tuple(system[: len(prompt.system)]) == prompt.system
    assert [m for m in plan.messages if m.role is not Role.SYSTEM] == list(prompt.turns[plan.dropped_turns :])
    assert 0 <= plan.summarized_turns <= plan.dropped_turns <= latest_turn(prompt.turns)
    rest = system[len(prompt.system) :]
    assert bool(plan.counts.older_summary) == (plan.summarized_turns > 0)
    assert plan.counts.older_summary <= budgets.older_summary
    if plan.summarized_turns:
        assert rest.pop(0).startswith(SUMMARY_TITLE)
    evidence = rest[0] if rest else ""
    assert len(rest) <= 1 and prompt.context in evidence
    for chunk in prompt.evidence:
        if chunk.chunk_id in plan.dropped_chunks:
            assert f"\n[{chunk.source_type} {chunk.chunk_id}]" not in evidence
        else:
            # Of several chunks with the same id the best is sent, perhaps as a part of another chunk.
            texts = [same_text(one.text) for one in prompt.evidence if one.chunk_id == chunk.chunk_id]
            shown = any(text in same_text(evidence) for text in texts)
            assert shown or chunk.chunk_id in plan.cut_chunks


@thorough
@given(prompt=strategies.prompts(), room=rooms, budgets=strategies.budgets)
def test_the_latest_user_turn_is_verbatim_in_the_decoded_prompt(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, room: int, budgets: SectionBudgets
) -> None:
    for kind, tokenizer, plan in each(tokenizers, prompt, room, budgets):
        latest = prompt.turns[-1].content
        if " x " not in tokenizer.decode(tokenizer.encode_chat([Message(Role.USER, " x ")])):
            latest = latest.strip()  # the template of this tokenizer trims contents
        assert latest in tokenizer.decode(plan.token_ids), kind
        assert plan.messages[-1] == prompt.turns[-1], kind


@thorough
@given(prompt=strategies.prompts(), rooms=st.tuples(rooms, rooms).map(sorted), budgets=strategies.budgets)
def test_more_room_never_keeps_less(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, rooms: list[int], budgets: SectionBudgets
) -> None:
    for kind, tokenizer, less in each(tokenizers, prompt, rooms[0], budgets):
        more = planned(tokenizer, prompt, rooms[1], budgets)
        assert more is not None, kind
        assert set(more.dropped_chunks) <= set(less.dropped_chunks), kind
        assert more.dropped_turns <= less.dropped_turns, kind
        assert set(more.cut_chunks) <= {*less.cut_chunks, *less.dropped_chunks}, kind
        if not less.summarized_turns:  # a summary makes room for the turns themselves
            assert more.counts.total >= less.counts.total, kind


@thorough
@given(prompt=strategies.prompts(), room=rooms, budgets=strategies.budgets)
def test_the_same_request_always_gives_the_same_plan(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, room: int, budgets: SectionBudgets
) -> None:
    cold = planned(tokenizers["demo"], prompt, room, budgets)
    warm = planned(tokenizers["demo"], prompt, room, budgets)
    assert cold == warm


@thorough
@given(
    prompt=strategies.prompts(),
    other=st.lists(strategies.chunks, max_size=4),
    context=st.text("abc: 何\n", max_size=9),
)
def test_other_evidence_and_context_change_no_token_before_them(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, other: list[EvidenceChunk], context: str
) -> None:
    changed = structs.replace(prompt, evidence=tuple(other), context=context)
    for kind in ("demo", "chatml", "headers"):
        tokenizer = tokenizers[kind]
        one, two = (planned(tokenizer, p, 100_000, SectionBudgets()) for p in (prompt, changed))
        assert one is not None and two is not None
        before = one.counts.total - one.counts.retrieval - _latest(tokenizer, prompt)
        assert one.prefix_tokens == two.prefix_tokens <= before, kind
        assert one.token_ids[:before] == two.token_ids[:before], kind


def _latest(tokenizer: ChatTokenizer, prompt: CanonicalPrompt) -> int:
    generation = len(tokenizer.encode_chat([])) - len(tokenizer.encode_chat([], kwargs={GENERATES: False}))
    return tokenizer.message_tokens(prompt.turns[-1]) + generation


@thorough
@given(prompt=strategies.prompts(), context=st.text(max_size=20))
def test_a_changed_context_changes_no_token_of_the_stable_prefix_of_any_template(
    tokenizers: Tokenizers, prompt: CanonicalPrompt, context: str
) -> None:
    assume(bool(prompt.context) == bool(context))
    changed = structs.replace(prompt, context=context)
    for kind in CHAT_KINDS:
        one, two = (planned(tokenizers[kind], p, 100_000, SectionBudgets()) for p in (prompt, changed))
        assert one is not None and two is not None
        assert one.token_ids[: one.prefix_tokens] == two.token_ids[: one.prefix_tokens], kind
        assert one.prefix_tokens == two.prefix_tokens, kind
