from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting import estimating
from budgeting.counting import ChatTokenizer
from budgeting.estimating import MAX_MARGIN, MIN_MARGIN, UNSEEN_MARGIN, EstimatingCounter, rough_tokens
from budgeting.values import Message, Role
from tests.budgeting import strategies
from tests.budgeting.test_random_conversations import text

# Largest fraction by which an upper estimate may be too low, after the first 20 reports of a model.
WORST_UNDER = 0.10


def talk(chance: random.Random) -> list[Message]:
    return [Message(Role.USER, text(chance, 30)) for _ in range(chance.randint(1, 12))]


@pytest.mark.parametrize("kind", ["demo", "headers", "unmarked"])
def test_the_upper_estimate_holds_once_a_model_has_reported(
    tokenizers: dict[str, ChatTokenizer], kind: str
) -> None:
    chance, counter, tokenizer = random.Random(7), EstimatingCounter(), tokenizers[kind]
    under: list[float] = []
    over: list[float] = []
    for number in range(300):
        messages = talk(chance)
        actual = len(tokenizer.encode_chat(messages))
        if number >= 20:
            estimate = counter.estimate(kind, messages)
            assert estimate.expected <= estimate.at_most
            under.append(max(0.0, 1 - estimate.at_most / actual))
            over.append(estimate.at_most / actual)
        counter.learn(kind, messages, actual)
    assert max(under) <= WORST_UNDER
    assert sum(short > 0 for short in under) <= 0.02 * len(under)
    assert sum(over) / len(over) <= 1 + MAX_MARGIN


def test_before_any_report_the_margin_is_the_stated_one() -> None:
    estimate = EstimatingCounter().estimate("new", [Message(Role.USER, "word " * 4_000)])
    assert estimate.at_most / estimate.expected == pytest.approx(1 + UNSEEN_MARGIN, rel=1e-3)


def test_a_model_that_reports_as_expected_earns_the_least_margin() -> None:
    counter, messages = EstimatingCounter(), [Message(Role.USER, "word " * 4_000)]
    for _ in range(100):
        counter.learn("steady", messages, round(rough_tokens(messages) * 1.4))
    estimate = counter.estimate("steady", messages)
    assert estimate.expected == pytest.approx(rough_tokens(messages) * 1.4, rel=0.01)
    assert estimate.at_most / estimate.expected == pytest.approx(1 + MIN_MARGIN, rel=1e-3)
    assert counter.estimate("other", messages).expected < estimate.expected


def test_the_estimate_follows_a_changed_model() -> None:
    counter, messages = EstimatingCounter(), [Message(Role.USER, "word " * 4_000)]
    for _ in range(100):
        counter.learn("moved", messages, round(rough_tokens(messages)))
    for _ in range(30):
        counter.learn("moved", messages, round(rough_tokens(messages) * 1.8))
    assert counter.estimate("moved", messages).expected == pytest.approx(
        rough_tokens(messages) * 1.8, rel=0.02
    )


def test_impossible_reports_change_the_estimate_little() -> None:
    counter, messages = EstimatingCounter(), [Message(Role.USER, "word " * 400)]
    for _ in range(50):
        counter.learn("m", messages, round(rough_tokens(messages)))
    counter.learn("m", messages, 0)
    counter.learn("m", messages, -5)
    assert counter.estimate("m", messages).expected <= rough_tokens(messages) * 1.01
    counter.learn("m", messages, 10**12)
    assert counter.estimate("m", messages).expected < rough_tokens(messages) * 2


def test_the_number_of_models_known_is_bounded() -> None:
    counter = EstimatingCounter()
    for number in range(estimating.MAX_MODELS + 50):
        counter.learn(f"model-{number}", [Message(Role.USER, "hi")], 20)
    assert counter._of.cache_info().currsize == estimating.MAX_MODELS


@given(first=strategies.texts, second=st.text(max_size=30))
def test_more_text_is_never_fewer_tokens(first: str, second: str) -> None:
    less, more = ([Message(Role.USER, one)] for one in (first, first + second))
    assert 0 < rough_tokens(less) <= rough_tokens(more)
    assert rough_tokens([*less, *more]) > rough_tokens(more)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("a" * 400, 100), ("я" * 100, 50), ("何" * 100, 90), ("🙂" * 100, 200), ("aя何🙂", 3.65)],
)
def test_a_character_counts_by_its_kind(text: str, tokens: float) -> None:
    empty = rough_tokens([Message(Role.USER, "")])
    assert rough_tokens([Message(Role.USER, text)]) - empty == pytest.approx(tokens)
