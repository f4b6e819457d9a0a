from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.errors import ContextTooLong, EmptyPrompt, InvalidReserve, TemplateRefused, UnknownTokenId
from budgeting.plan import INLINE_CHARS, BudgetPlanner, default_reserve
from budgeting.sections import prompt_messages
from budgeting.summary import Count, Summary
from budgeting.template import GENERATES
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    EvidenceChunk,
    Message,
    Plan,
    PromptSection,
    Role,
    SectionBudgets,
    SectionCounts,
    SummaryKind,
    Tool,
)
from tests.budgeting.folders import CHATML, byte_level, write_folder

USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM


def talk(pairs: int, words: int = 12) -> tuple[Message, ...]:
    older = [
        message
        for n in range(pairs)
        for message in (Message(USER, f"question {n} " * words), Message(ASSISTANT, f"answer {n} " * words))
    ]
    return (*older, Message(USER, "And what should I read next?"))


def chunk(name: str, score: float | None, words: int = 20) -> EvidenceChunk:
    return EvidenceChunk(name, "catalog", f"{name} is a manga. " * words, score)


def plan(tokenizer: ChatTokenizer, prompt: CanonicalPrompt, room: int, **rest: object) -> Plan:
    """A plan with exactly ``room`` tokens for the prompt."""
    planner = BudgetPlanner(tokenizer, max_model_len=room + 10)
    asked = {"max_tokens": 10, "budgets": SectionBudgets(), **rest}
    return planner.plan(BudgetRequest(prompt=prompt, **asked))  # type: ignore[arg-type]


def trimmed(found: Plan) -> bool:
    """Whether anything that the caller sent is missing from the prompt."""
    return bool(found.dropped_chunks or found.cut_chunks or found.dropped_turns)


def size(tokenizer: ChatTokenizer, prompt: CanonicalPrompt) -> int:
    return len(tokenizer.encode_chat(prompt_messages(prompt)))


@pytest.mark.parametrize(
    ("max_model_len", "reserve"), [(4096, 696), (8192, 4792), (2048, 348), (3500, 594), (4116, 716), (2, 1)]
)
def test_trimming_keeps_what_the_sections_leave_or_a_share_for_the_answer(
    max_model_len: int, reserve: int
) -> None:
    assert default_reserve(max_model_len, SectionBudgets().total) == reserve


def test_the_answers_room_is_the_callers_else_the_versions_else_the_rest(tokenizer: ChatTokenizer) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=4096)
    prompt = CanonicalPrompt(turns=talk(0))
    rest = 4096 - size(tokenizer, prompt)
    for budgets in (None, SectionBudgets()):
        for request, reserve in (
            (BudgetRequest(prompt, max_tokens=100, reserve=200, budgets=budgets), 100),
            (BudgetRequest(prompt, reserve=200, budgets=budgets), 200),
            (BudgetRequest(prompt, budgets=budgets), rest),
            (BudgetRequest(prompt, reserve=4096, budgets=budgets), rest),
            (BudgetRequest(prompt, max_tokens=100, lenient=True, budgets=budgets), 100),
            (BudgetRequest(prompt, max_tokens=32_000, lenient=True, budgets=budgets), rest),
        ):
            found = planner.plan(request)
            assert (found.generation_reserve, found.open_ended) == (reserve, reserve == rest)


def test_trimming_keeps_no_more_than_the_answers_upper_bound(tokenizer: ChatTokenizer) -> None:
    prompt = CanonicalPrompt(turns=talk(20))
    tokens = size(tokenizer, prompt)
    planner, budgets = BudgetPlanner(tokenizer, max_model_len=tokens + 60), SectionBudgets(recent_turns=100)
    for bound, whole in ((20, True), (60, True), (61, False), (32_000, False)):
        found = planner.plan(BudgetRequest(prompt, max_tokens=bound, lenient=True, budgets=budgets))
        assert trimmed(found) is not whole
        assert found.generation_reserve >= min(bound, 60)


def test_without_budgets_nothing_is_trimmed_and_what_does_not_fit_is_refused(
    tokenizer: ChatTokenizer,
) -> None:
    evidence = tuple(chunk(f"m{n}", 1 / (n + 1)) for n in range(20))
    prompt = CanonicalPrompt(system=("Be kind.",), turns=talk(60), evidence=evidence)
    tokens = size(tokenizer, prompt)
    planner = BudgetPlanner(tokenizer, max_model_len=tokens + 50)
    found = planner.plan(BudgetRequest(prompt))
    assert (found.counts.total, trimmed(found), found.generation_reserve) == (tokens, False, 50)
    assert planner.plan(BudgetRequest(prompt, max_tokens=50)).counts.total == tokens
    for asked, allowed in (
        (BudgetRequest(prompt, max_tokens=51), tokens - 1),
        (BudgetRequest(prompt, max_input_tokens=tokens - 9), tokens - 9),
    ):
        with pytest.raises(
            ContextTooLong, match=f"the prompt has {tokens} tokens > .* none of them may be"
        ) as caught:
            planner.plan(asked)
        assert (caught.value.needed, caught.value.allowed) == (tokens, allowed)
    with pytest.raises(ContextTooLong):
        planner.plan(BudgetRequest(CanonicalPrompt(turns=(Message(USER, "word " * 30_000),))))


def test_a_latest_turn_beyond_the_sections_is_served_when_the_model_has_room(
    tokenizer: ChatTokenizer,
) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=32_768)
    prompt = CanonicalPrompt(turns=(*talk(30), Message(USER, "manga " * 9_000)))
    found = planner.plan(BudgetRequest(prompt, budgets=SectionBudgets()))
    assert found.counts.total > 9_000 and found.dropped_turns == 61
    assert found.generation_reserve == 32_768 - found.counts.total


@pytest.mark.parametrize("max_tokens", [0, -1, 4096, 10**9])
def test_a_reserve_that_leaves_no_prompt_is_refused(tokenizer: ChatTokenizer, max_tokens: int) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=4096)
    with pytest.raises(InvalidReserve, match=f"max_tokens is {max_tokens}; allowed: 1 to 4095"):
        planner.plan(BudgetRequest(CanonicalPrompt(turns=talk(0)), max_tokens=max_tokens))


def test_a_prompt_that_fits_to_the_token_is_sent_whole(tokenizer: ChatTokenizer) -> None:
    prompt = CanonicalPrompt(
        system=("Be kind.",), turns=talk(3), evidence=(chunk("a", 0.5), chunk("b", 0.9)), context="locale: ja"
    )
    found = plan(tokenizer, prompt, size(tokenizer, prompt))
    assert not trimmed(found)
    assert found.messages == prompt_messages(prompt)
    assert found.token_ids == tokenizer.encode_chat(found.messages)
    assert trimmed(plan(tokenizer, prompt, size(tokenizer, prompt) - 1))


@pytest.mark.parametrize("budgets", [None, SectionBudgets()], ids=["no budgets", "budgets"])
def test_a_prompt_of_many_characters_a_token_is_sent_whole_if_its_tokens_fit(
    tmp_path: Path, budgets: SectionBudgets | None
) -> None:
    lines = byte_level(["<|im_start|>", "<|im_end|>"], ["=" * 64])
    tokenizer = ChatTokenizer(write_folder(tmp_path / "lines", lines, CHATML, eos_token="<|im_end|>"))
    turns = [
        message for pair in range(10) for message in (Message(USER, "=" * 640), Message(ASSISTANT, "=" * 640))
    ]
    prompt = CanonicalPrompt(turns=(*turns, Message(USER, "=" * 640)))
    room = size(tokenizer, prompt)
    assert room < 21 * 640 / 8
    found = plan(tokenizer, prompt, room, budgets=budgets)
    assert not trimmed(found) and found.counts.total == room


def test_every_part_counts_in_its_section(tokenizer: ChatTokenizer) -> None:
    prompt = CanonicalPrompt(
        system=("Be kind.",), turns=talk(2), evidence=(chunk("a", None),), context="locale: ja"
    )
    found = plan(tokenizer, prompt, 4000)
    assert found.counts.total == len(found.token_ids)
    assert found.counts.older_summary == 0
    assert min(found.counts.system, found.counts.retrieval, found.counts.recent_turns) > 0
    assert found.prefix_tokens == found.counts.system
    if tokenizer.per_message:
        evidence = found.token_ids[-found.counts.retrieval - _tail(tokenizer, prompt) :]
        assert "Evidence:\n[catalog a] a is a manga." in tokenizer.decode(evidence)


def _tail(tokenizer: ChatTokenizer, prompt: CanonicalPrompt) -> int:
    return tokenizer.message_tokens(prompt.turns[-1]) + len(tokenizer.encode_chat([])) - _head(tokenizer)


def _head(tokenizer: ChatTokenizer) -> int:
    return len(tokenizer.encode_chat([], kwargs={GENERATES: False}))


def test_the_oldest_turns_go_first_and_in_pairs(tokenizer: ChatTokenizer) -> None:
    prompt = CanonicalPrompt(system=("Be kind.",), turns=talk(5))
    found = plan(tokenizer, prompt, size(tokenizer, prompt) * 2 // 3)
    assert 0 < found.dropped_turns < 10
    assert found.dropped_turns % 2 == 0
    assert found.messages == (Message(SYSTEM, "Be kind."), *prompt.turns[found.dropped_turns :])


def test_older_turns_are_dropped_before_evidence(tokenizer: ChatTokenizer) -> None:
    evidence = tuple(chunk(name, 0.5) for name in "abc")
    prompt = CanonicalPrompt(turns=talk(8), evidence=evidence)
    least = size(tokenizer, CanonicalPrompt(turns=talk(0), evidence=evidence))
    found = plan(tokenizer, prompt, least + 5)
    assert found.dropped_chunks == ()
    assert found.dropped_turns == 16


def test_the_lowest_scores_are_dropped_and_the_rest_keeps_the_callers_order(tokenizer: ChatTokenizer) -> None:
    evidence = (chunk("none", None), chunk("low", 0.1), chunk("high", 0.9), chunk("middle", 0.5))
    prompt = CanonicalPrompt(turns=talk(0), evidence=evidence)
    rest = CanonicalPrompt(turns=talk(0), evidence=(chunk("high", 0.9), chunk("middle", 0.5)))
    found = plan(tokenizer, prompt, size(tokenizer, rest) + 5)
    assert found.dropped_chunks == ("none", "low")
    assert found.messages == prompt_messages(rest)


def test_a_chunk_that_can_never_fit_does_not_shut_out_the_others(tokenizer: ChatTokenizer) -> None:
    evidence = (chunk("giant", 0.99, words=2000), chunk("small", 0.1))
    found = plan(tokenizer, CanonicalPrompt(turns=talk(1), evidence=evidence), 1500)
    assert found.dropped_chunks == ("giant",)
    assert found.dropped_turns == 0


def test_a_dropped_duplicate_is_reported_with_its_twin(tokenizer: ChatTokenizer) -> None:
    twin = EvidenceChunk("twin", "catalog", chunk("a", 0.2).text, 0.1)
    prompt = CanonicalPrompt(turns=talk(0), evidence=(twin, chunk("a", 0.2)))
    assert plan(tokenizer, prompt, 1000).dropped_chunks == ()
    assert plan(tokenizer, prompt, size(tokenizer, CanonicalPrompt(turns=talk(0)))).dropped_chunks == (
        "twin",
        "a",
    )


def test_a_long_system_part_borrows_from_every_other_section(tokenizer: ChatTokenizer) -> None:
    system = ("manga rules " * 60,)
    prompt = CanonicalPrompt(system=system, turns=talk(3), evidence=(chunk("a", 0.5),))
    least = size(tokenizer, CanonicalPrompt(system=system, turns=talk(0)))
    found = plan(tokenizer, prompt, least, budgets=SectionBudgets(system=10))
    assert found.counts.total == least
    assert found.dropped_chunks == ("a",)
    assert found.dropped_turns == 6


@pytest.mark.parametrize(
    ("prompt", "section"),
    [
        (CanonicalPrompt(system=("rules " * 500,), turns=talk(2)), PromptSection.SYSTEM),
        (CanonicalPrompt(turns=(*talk(2), Message(USER, "question " * 500))), PromptSection.RECENT_TURNS),
        (CanonicalPrompt(turns=talk(2), context="history: " + "manga " * 500), PromptSection.RETRIEVAL),
    ],
)
def test_only_what_may_not_be_trimmed_is_too_long(
    tokenizer: ChatTokenizer, prompt: CanonicalPrompt, section: PromptSection
) -> None:
    with pytest.raises(ContextTooLong) as caught:
        plan(tokenizer, prompt, 200)
    error = caught.value
    least = CanonicalPrompt(system=prompt.system, turns=prompt.turns[-1:], context=prompt.context)
    assert (error.section, error.needed, error.allowed) == (section, size(tokenizer, least), 200)
    assert plan(tokenizer, prompt, error.needed).counts.total == error.needed


def test_a_raw_prompt_is_counted_as_it_is_and_never_trimmed(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("Once upon a time")
    for raw in ("Once upon a time", ids):
        found = plan(tokenizer, CanonicalPrompt(raw=raw), len(ids))
        assert (found.token_ids, found.messages, found.prefix_tokens) == (ids, (), 0)
        assert found.counts == SectionCounts(recent_turns=len(ids))
        with pytest.raises(ContextTooLong) as caught:
            plan(tokenizer, CanonicalPrompt(raw=raw), len(ids) - 1)
        assert caught.value.section is PromptSection.RECENT_TURNS


def test_a_raw_prompt_of_nothing_or_of_unknown_ids_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(EmptyPrompt):
        plan(tokenizer, CanonicalPrompt(raw=()), 100)
    with pytest.raises(UnknownTokenId, match=f"token id {tokenizer.vocabulary} is not"):
        plan(tokenizer, CanonicalPrompt(raw=(1, tokenizer.vocabulary)), 100)
    with pytest.raises(UnknownTokenId):
        plan(tokenizer, CanonicalPrompt(raw=(-1,)), 100)


def test_a_conversation_the_template_does_not_take_is_refused(tokenizers: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(TemplateRefused):
        plan(tokenizers["alternating"], CanonicalPrompt(turns=(*talk(1), *talk(0))), 500)


def test_a_model_of_one_token_is_no_model(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ValueError, match="max_model_len is 1; allowed: at least 2"):
        BudgetPlanner(tokenizer, max_model_len=1)


def test_a_prompt_is_trimmed_to_the_sum_of_its_sections(tokenizer: ChatTokenizer) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=4096)
    small = SectionBudgets(system=100, retrieval=400, recent_turns=400, older_summary=100)
    found = planner.plan(BudgetRequest(CanonicalPrompt(turns=talk(60)), budgets=small))
    assert 600 < found.counts.total <= 1_000 and found.dropped_turns > 0
    assert found.generation_reserve == 4096 - found.counts.total


def test_a_chunk_that_alone_exceeds_its_section_is_cut_at_a_sentences_end(tokenizer: ChatTokenizer) -> None:
    text = " ".join(f"Sentence {n} tells of volume {n}." for n in range(200))
    prompt = CanonicalPrompt(turns=talk(4), evidence=(EvidenceChunk("long", "catalog", text, 0.9),))
    found = plan(tokenizer, prompt, 700, budgets=SectionBudgets(retrieval=300))
    assert (found.cut_chunks, found.dropped_chunks) == (("long",), ())
    assert trimmed(found)
    [evidence] = [m.content for m in found.messages if m.content.startswith("Evidence:")]
    shown = evidence.removeprefix("Evidence:\n[catalog long] ")
    assert text.startswith(shown) and shown.endswith(".") and len(shown) > 100
    assert found.counts.retrieval <= 310
    assert found.dropped_turns < 8


def test_a_chunk_is_whole_again_when_there_is_room_to_borrow(tokenizer: ChatTokenizer) -> None:
    text = " ".join(f"Sentence {n}." for n in range(40))
    prompt = CanonicalPrompt(turns=talk(60), evidence=(EvidenceChunk("long", "catalog", text, 0.9),))
    budgets = SectionBudgets(retrieval=60, recent_turns=100, older_summary=0)
    found = plan(tokenizer, prompt, size(tokenizer, prompt) - 50, budgets=budgets)
    assert found.dropped_turns > 0
    assert (found.cut_chunks, found.dropped_chunks) == ((), ())


def test_duplicates_are_sent_once_and_reported(tokenizer: ChatTokenizer) -> None:
    text = "Vinland Saga, volume 1, hardcover, in stock."
    evidence = (
        EvidenceChunk("a", "catalog", text, 0.9),
        EvidenceChunk("b", "catalog", text.upper(), 0.8),
        EvidenceChunk("c", "catalog", f"{text} It ships today.", 0.7),
    )
    found = plan(tokenizer, CanonicalPrompt(turns=talk(0), evidence=evidence), 1000)
    assert (found.merged_chunks, found.dropped_chunks) == (("a", "b"), ())
    assert not trimmed(found)
    assert sum("hardcover" in m.content.lower() for m in found.messages) == 1


def test_turns_that_are_not_sent_stand_in_a_summary_of_at_most_its_budget(tokenizer: ChatTokenizer) -> None:
    prompt = CanonicalPrompt(system=("Be kind.",), turns=talk(12))
    found = plan(tokenizer, prompt, 500, budgets=SectionBudgets(recent_turns=300, older_summary=120))
    assert 0 < found.counts.older_summary <= 120
    assert found.summarized_turns == found.dropped_turns > 0
    assert found.messages[1].content.startswith("Earlier in this conversation:\n")
    assert found.counts.total == len(found.token_ids) <= 500
    assert found.messages[2:] == prompt.turns[found.dropped_turns :]


def test_without_a_summarizer_or_a_budget_for_it_turns_are_left_out(tokenizer: ChatTokenizer) -> None:
    prompt = CanonicalPrompt(turns=talk(12))
    for rest in ({"summary": SummaryKind.NONE}, {"budgets": SectionBudgets(older_summary=0)}):
        found = plan(tokenizer, prompt, 500, **rest)
        assert (found.counts.older_summary, found.summarized_turns) == (0, 0)
        assert found.dropped_turns > 0


class Endless:
    """A summarizer whose summaries exceed ``max_tokens``; it records each ``max_tokens``."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def summarize(
        self, turns: Sequence[Message], *, max_tokens: int, count: Count, owner: str = ""
    ) -> Summary | None:
        self.asked.append(max_tokens)
        return Summary("manga " * 500, len(turns))


def test_a_summary_that_is_too_long_is_asked_for_again_and_then_left_out(tokenizer: ChatTokenizer) -> None:
    endless = Endless()
    planner = BudgetPlanner(tokenizer, max_model_len=510, summarizers={SummaryKind.ENGINE: endless})
    request = BudgetRequest(
        CanonicalPrompt(turns=talk(12)),
        max_tokens=10,
        budgets=SectionBudgets(recent_turns=200),
        summary=SummaryKind.ENGINE,
    )
    found = planner.plan(request)
    assert len(endless.asked) == 3
    assert found.summarized_turns == found.counts.older_summary == 0
    assert found.counts.total <= 500


def test_evidence_does_not_borrow_where_the_route_does_not_let_it(tokenizer: ChatTokenizer) -> None:
    evidence = tuple(chunk(name, 0.5) for name in "abcdef")
    prompt = CanonicalPrompt(turns=talk(12), evidence=evidence)
    budgets = SectionBudgets(retrieval=150, recent_turns=100, older_summary=0)
    first = plan(tokenizer, prompt, 900, budgets=budgets)
    second = plan(tokenizer, prompt, 900, budgets=budgets, spare=(PromptSection.RECENT_TURNS,))
    assert len(second.dropped_chunks) > len(first.dropped_chunks)
    assert second.counts.retrieval <= 160
    assert second.dropped_turns < first.dropped_turns


@pytest.mark.parametrize(
    "prompt",
    [
        CanonicalPrompt(turns=talk(0)),
        CanonicalPrompt(turns=talk(40)),
        CanonicalPrompt(turns=talk(100, words=1)),
        CanonicalPrompt(turns=talk(0), evidence=(chunk("a", 0.5, words=500),)),
        CanonicalPrompt(raw="manga " * INLINE_CHARS),
        CanonicalPrompt(raw=(1,) * 100),
    ],
)
async def test_planning_in_a_thread_gives_the_same_plan(
    tokenizer: ChatTokenizer, prompt: CanonicalPrompt
) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=100_000)
    request = BudgetRequest(prompt, max_tokens=100)
    assert await planner.plan_async(request) == planner.plan(request)


class CountedTokenizer(ChatTokenizer):
    """Counts how often the work for a conversation is measured."""

    measured = 0

    def unseen_chars(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        self.measured += 1
        return super().unseen_chars(messages, tools)


async def test_a_chat_that_is_planned_in_a_thread_is_measured_once(tmp_path: Path) -> None:
    tokenizer = CountedTokenizer(write_folder(tmp_path, byte_level(["<|im_start|>", "<|im_end|>"]), CHATML))
    long = CanonicalPrompt(turns=(Message(USER, "manga " * INLINE_CHARS * tokenizer.speed),))
    await BudgetPlanner(tokenizer, max_model_len=1_000_000).plan_async(BudgetRequest(long))
    assert tokenizer.measured == 1
