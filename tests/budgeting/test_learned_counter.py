"""Counting for a model whose tokenizer cannot be read: by its workers, or by an estimate that learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.counting import ChatTokenizer
from budgeting.errors import NoTokenizer
from budgeting.estimating import EstimatingCounter, rough_tokens
from budgeting.learned_counter import LearnedCounter
from budgeting.plan import BudgetPlanner
from budgeting.values import BudgetRequest, CanonicalPrompt, Message, Role, Tool
from tests.budgeting.conftest import DEMO

SYSTEM = Message(Role.SYSTEM, "You recommend books.")
ASKED = Message(Role.USER, "What should I read next, after a long novel about the sea?")
ANSWERED = Message(Role.ASSISTANT, "Something short.")
TOOL = Tool("search", description="Finds books", parameters='{"type":"object"}')
TEXTS = st.text(max_size=60)
TURNS = st.lists(
    st.builds(Message, st.sampled_from([Role.USER, Role.ASSISTANT]), TEXTS), min_size=1, max_size=6
)


class Workers:
    """Workers with the demo model's tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = ChatTokenizer(DEMO)
        self.silent = False
        self.is_missing = False
        self.asked = 0

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> tuple[int, ...] | None:
        self.asked += 1
        if self.silent:
            return None
        return self.tokenizer.encode_chat(messages, tools=tools, kwargs=kwargs)

    def text(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
        return None if self.silent else self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        return None if self.silent else self.tokenizer.decode(token_ids)


@pytest.fixture
def workers() -> Workers:
    return Workers()


def counter_of(workers: Workers | None) -> LearnedCounter:
    return LearnedCounter("qwen", EstimatingCounter(), workers)


def test_a_conversation_has_the_workers_ids_and_its_parts_end_where_theirs_do(workers: Workers) -> None:
    counter, messages = counter_of(workers), [SYSTEM, ASKED, ANSWERED, ASKED]
    exact = workers.tokenizer.encode_parts(messages, (1, 2, 4))
    assert counter.encode_parts(messages, (1, 2, 4)) == exact
    assert counter.encoder == "the workers' /tokenize"


def test_a_conversation_is_asked_for_once(workers: Workers) -> None:
    counter = counter_of(workers)
    counter.encode_parts([SYSTEM, ASKED], (1, 1))
    asked = workers.asked
    counter.encode_parts([SYSTEM, ASKED], (1, 1))
    assert workers.asked == asked == 2
    counter.encode_parts([SYSTEM, ASKED, ANSWERED], (1, 1))
    assert workers.asked == 3  # the count of its system message is stored


def test_without_replies_of_workers_tokens_are_estimated_from_earlier_replies(workers: Workers) -> None:
    counter, long = counter_of(workers), Message(Role.USER, "novel " * 300)
    exact = len(counter.encode_parts([long], ()).token_ids)
    workers.silent = True
    estimated = len(counter.encode_parts([long, Message(Role.USER, "")], ()).token_ids)
    assert estimated == pytest.approx(exact, rel=0.1)
    assert "estimate" in counter.encoder


def test_raw_texts_are_never_made_of_estimated_ids(workers: Workers) -> None:
    counter = counter_of(workers)
    assert counter.decode(counter.encode("a book")) == "a book"
    workers.silent = True
    for ask in (lambda: counter.encode("a book"), lambda: counter.encode_chat([ASKED])):
        with pytest.raises(NoTokenizer, match="try again") as caught:
            ask()
        assert caught.value.later
    with pytest.raises(NoTokenizer, match=r"models\.qwen\.tokenizer"):
        counter_of(None).encode("a book")
    with pytest.raises(NoTokenizer):
        counter_of(None).encode_chat([ASKED])
    assert counter_of(None).encode("") == ()


def test_a_text_for_workers_without_a_tokenize_path_is_not_asked_for_again(workers: Workers) -> None:
    workers.silent = workers.is_missing = True
    with pytest.raises(NoTokenizer, match=r"models\.qwen\.tokenizer") as caught:
        counter_of(workers).encode("a book")
    assert not caught.value.later


def test_ids_that_no_vocabulary_has_are_found() -> None:
    assert counter_of(None).unknown_id((1, 2)) is None
    assert counter_of(None).unknown_id((1, -2)) == -2


def test_tools_count(workers: Workers) -> None:
    for counter in (counter_of(None), counter_of(workers)):
        before, whole = counter.tool_tokens((TOOL,), {}, system=True)
        assert before == whole >= 0
        assert counter.tool_tokens((), {}, system=True) == (0, 0)
    assert counter_of(None).tool_tokens((TOOL,), {}, system=False)[1] > 5


@given(TURNS, TURNS)
def test_estimated_conversations_of_one_beginning_share_ids_as_far_as_it_goes(
    one: list[Message], other: list[Message]
) -> None:
    counter = counter_of(None)
    first, second = (counter.encode_parts([SYSTEM, *turns], (1,)) for turns in (one, other))
    end = first.ends[0]
    assert second.ends[0] == end > 0
    assert first.token_ids[:end] == second.token_ids[:end]
    if one != other:
        assert first.token_ids != second.token_ids


def test_a_conversation_that_goes_on_begins_with_the_same_estimated_ids_after_further_reports() -> None:
    counter, conversation = counter_of(None), [SYSTEM, *[ASKED, ANSWERED] * 40]
    for number in range(40):
        before = counter.encode_parts(conversation, ()).token_ids
        counter.learn(conversation, (), round(rough_tokens(conversation) * (1.2 + 0.03 * (number % 3))))
        conversation = [*conversation, ASKED]
        after = counter.encode_parts(conversation, ()).token_ids
        assert number < 10 or after[: len(before)] == before
    for _ in range(40):
        counter.learn(conversation, (), 4_000)
    assert len(counter.encode_parts(conversation, ()).token_ids) == pytest.approx(4_000, rel=0.1)


@given(TURNS)
def test_estimated_parts_ascend_and_end_within_the_whole(turns: list[Message]) -> None:
    cuts = tuple(range(len(turns) + 1))
    chat = counter_of(None).encode_parts(turns, cuts)
    assert chat.ends[0] == 0
    assert all(one < other for one, other in pairwise(chat.ends))
    assert chat.ends[-1] == len(chat.token_ids)


async def test_a_plan_that_asks_a_worker_never_runs_on_the_event_loop(workers: Workers) -> None:
    offloaded: list[Callable[[], Any]] = []

    async def offload(work: Callable[[], Any], /) -> Any:
        offloaded.append(work)
        return work()

    planner = BudgetPlanner(counter_of(workers), max_model_len=512)
    for prompt in (CanonicalPrompt((), (ASKED,)), CanonicalPrompt((), (), raw="a book")):
        plan = await planner.plan_async(BudgetRequest(prompt), offload)
        assert plan.counts.total == len(plan.token_ids) > 0
    assert len(offloaded) == 2


async def test_a_long_conversation_is_not_estimated_on_the_event_loop() -> None:
    offloaded: list[int] = []

    async def offload(work: Callable[[], Any], /) -> Any:
        offloaded.append(len(ASKED.content) * times)
        return work()

    planner = BudgetPlanner(LearnedCounter("m", EstimatingCounter(), None), max_model_len=1 << 30)
    for times in (1, 100, 10_000):
        turns = (Message(Role.USER, ASKED.content * times),)
        await planner.plan_async(BudgetRequest(CanonicalPrompt(turns=turns)), offload)
    assert offloaded == [len(ASKED.content) * 10_000]
