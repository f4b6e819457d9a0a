import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.replay.options import ReplayError
from ops.replay.shape import CLAMP_MARGIN, Planned, plan
from ops.replay.text import WORDS, Lexicon, TextMaker
from ops.replay.trace import Trace, TraceRequest

LEXICON = Lexicon(tuple((word, 1 + len(word) // 6) for word in WORDS), overhead=11, calibrated=True)
COST = dict(LEXICON.costs)
arrivals = st.builds(
    TraceRequest,
    st.floats(0, 1e4),
    st.integers(1, 200_000),
    st.integers(1, 5000),
    st.lists(st.integers()).map(tuple),
)


def tokens(text: str) -> int:
    return sum(COST[word] for word in text.split())


def trace(*rows: TraceRequest, block_tokens: int = 0) -> Trace:
    return Trace("t", "azure", rows, block_tokens)


def test_times_are_divided_and_lengths_multiplied() -> None:
    shaped = list(
        plan(
            trace(TraceRequest(0, 374, 44), TraceRequest(10, 396, 109)),
            speed=4,
            scale_tokens=0.1,
            max_model_len=4096,
        )
    )
    assert [(p.due_s, p.prompt_tokens, p.max_tokens, p.clamped) for p in shaped] == [
        (0.0, 37, 4, False), (2.5, 40, 11, False),
    ]  # fmt: skip


@given(
    st.lists(arrivals, min_size=1, max_size=20), st.floats(0.001, 100), st.integers(2 * CLAMP_MARGIN, 100_000)
)
def test_prompt_and_answer_always_fit_the_model_and_never_vanish(
    rows: list[TraceRequest], scale: float, longest: int
) -> None:
    for planned in plan(trace(*rows), speed=1, scale_tokens=scale, max_model_len=longest):
        assert planned.prompt_tokens >= 1
        assert planned.max_tokens >= 1
        assert planned.prompt_tokens + planned.max_tokens <= longest


def test_an_answer_gives_way_before_a_prompt_but_keeps_half() -> None:
    rows = [TraceRequest(0, 900, 900), TraceRequest(0, 100, 2000), TraceRequest(0, 5000, 900)]
    shaped = plan(trace(*rows), speed=1, scale_tokens=1, max_model_len=1000)
    assert [(p.prompt_tokens, p.max_tokens) for p in shaped] == [
        (468, 500), (100, 868), (468, 500),
    ]  # fmt: skip
    assert all(p.clamped for p in plan(trace(*rows), speed=1, scale_tokens=1, max_model_len=1000))


def test_a_model_too_short_for_anything_is_refused_by_name() -> None:
    with pytest.raises(ReplayError, match="--max-model-len: 10 is too short"):
        list(plan(trace(TraceRequest(0, 1, 1)), speed=1, scale_tokens=1, max_model_len=10))


@given(st.integers(1, 5000), st.integers(0, 50))
def test_a_prompt_has_the_tokens_asked_for(wanted: int, seed: int) -> None:
    text = TextMaker(LEXICON, seed).prompt(Planned(0, 0.0, wanted, 1))
    assert tokens(text) == max(1, wanted - LEXICON.overhead)


def test_the_same_seed_gives_the_same_text_and_another_seed_another_text() -> None:
    planned = Planned(3, 0.0, 200, 1)
    assert TextMaker(LEXICON, 1).prompt(planned) == TextMaker(LEXICON, 1).prompt(planned)
    assert TextMaker(LEXICON, 1).prompt(planned) != TextMaker(LEXICON, 2).prompt(planned)


def test_requests_without_blocks_share_no_beginning() -> None:
    maker = TextMaker(LEXICON, 0)
    beginnings = {maker.prompt(Planned(index, 0.0, 100, 1))[:60] for index in range(200)}
    assert len(beginnings) == 200


def test_equal_leading_blocks_give_an_equal_beginning_of_their_length() -> None:
    maker = TextMaker(LEXICON, 0)
    first = maker.prompt(Planned(0, 0.0, 340, 1, (7, 8, 9), 100))
    second = maker.prompt(Planned(1, 0.0, 311, 1, (7, 8, 10), 100))
    common = next(n for n, (a, b) in enumerate(zip(first.split(), second.split(), strict=False)) if a != b)
    assert 200 <= tokens(" ".join(first.split()[:common])) < 215
    assert tokens(first) == 340 - LEXICON.overhead
    assert tokens(second) == 311 - LEXICON.overhead


def test_words_that_cost_more_than_is_left_are_not_used() -> None:
    dear = Lexicon((("encyclopedia", 5), ("compendium", 3)))
    assert len(TextMaker(dear, 0).words("x", 8).split()) in (2, 1)
    assert TextMaker(dear, 0).words("x", 2) == "encyclopedia"  # one word at least
