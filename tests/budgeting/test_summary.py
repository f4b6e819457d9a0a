from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.sentences import sentences
from budgeting.summary import MAX_SENTENCES, ExtractiveSummarizer, Summary
from budgeting.values import Message, Role
from tests.budgeting import strategies

USER, ASSISTANT = Role.USER, Role.ASSISTANT


def words(text: str) -> int:
    """A stand-in for a tokenizer: a token every three characters."""
    return (len(text) + 2) // 3


def summarized(turns: list[Message], max_tokens: int = 60) -> Summary | None:
    return ExtractiveSummarizer().summarize(turns, max_tokens=max_tokens, count=words)


TALK = [
    Message(USER, "Hello! I ordered the Vinland Saga box set, order 88123. It has not arrived."),
    Message(ASSISTANT, "Thank you for writing. Let me look. Order 88123 left our house on Monday."),
    Message(USER, "Nice weather today. Can the Vinland Saga order go to my office instead?"),
    Message(ASSISTANT, "Yes. I changed the address of order 88123 to your office."),
]


def test_the_sentences_that_share_words_with_the_conversation_are_taken_in_their_order() -> None:
    found = summarized(TALK)
    assert found is not None and found.turns == 4
    assert "order 88123" in found.text
    assert "weather" not in found.text
    lines = found.text.split("\n")
    assert all(line.startswith(("user: ", "assistant: ")) for line in lines)


def test_other_scripts_are_summarized_too() -> None:
    talk = [
        Message(
            USER, "ヴィンランド・サガの全巻セットを注文しました。今日はいい天気ですね。注文番号は八八一です。"
        ),
        Message(ASSISTANT, "ご注文ありがとうございます。ヴィンランド・サガの全巻セットは発送済みです。"),
    ]
    found = summarized(talk, 30)
    assert found is not None
    assert "全巻セット" in found.text and "天気" not in found.text


def test_nothing_useful_fits_in_no_room() -> None:
    assert summarized(TALK, 3) is None
    assert summarized([Message(USER, "a very long sentence indeed " * 20)], 8) is None
    assert summarized([], 100) is None
    assert summarized([Message(USER, "  \n ")], 100) is None


def test_the_same_turns_give_the_same_summary_from_the_cache() -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return words(text)

    summarizer = ExtractiveSummarizer()
    first = summarizer.summarize(TALK, max_tokens=60, count=count)
    assert counted
    counted.clear()
    assert summarizer.summarize(list(TALK), max_tokens=60, count=count) is first
    assert counted == []
    assert summarizer.summarize(TALK, max_tokens=20, count=count) != first
    assert ExtractiveSummarizer().summarize(TALK, max_tokens=60, count=count) == first


turns = st.lists(st.builds(Message, st.sampled_from([USER, ASSISTANT]), strategies.texts), max_size=10)


@strategies.examples(200)
@given(turns=turns, room=st.integers(0, 80))
def test_a_summary_never_exceeds_its_room_and_says_nothing_that_was_not_said(
    turns: list[Message], room: int
) -> None:
    found = summarized(turns, room)
    if found is None:
        return
    assert 0 < words(found.text) <= room
    assert found.turns == len(turns)
    said = {sentence for turn in turns for sentence in sentences(turn.content)}
    for line in found.text.split("\n"):
        _, _, rest = line.partition(": ")
        while rest:
            start = next((one for one in sorted(said, key=len, reverse=True) if rest.startswith(one)), None)
            assert start is not None
            rest = rest[len(start) :].lstrip()


@pytest.mark.parametrize("count", [1, 400])
def test_very_long_conversations_take_bounded_work(count: int) -> None:
    chance = random.Random(5)
    long = [
        Message(USER, " ".join(f"w{chance.randrange(500)}" for _ in range(5_000 // count)) + ". Yes. No. 12!")
        for _ in range(count)
    ]
    summarizer = ExtractiveSummarizer()
    began = time.process_time()
    found = summarizer.summarize(long * 10, max_tokens=400, count=words)
    assert time.process_time() - began < 1.0
    assert found is not None
    assert len(summarizer._candidates(long * 10)[1]) <= MAX_SENTENCES
