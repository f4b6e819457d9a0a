"""Which questions count as similar: measured on pairs by hand, and what must never be taken for the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evaluation.response_cache import load_pairs, score, similarity
from resilience.word_embedding.model import FILE_NAME, EmbeddingError, WordEmbedding
from resilience.word_embedding.question_text import MAX_CHARS

FOLDER = Path(__file__).parents[2] / "models" / "embedding"
MODEL = WordEmbedding.from_folder(FOLDER)


def same(one: str, other: str) -> bool:
    found, threshold = similarity(MODEL, one, other)
    return found >= threshold


def test_of_the_pairs_by_hand_none_is_taken_wrongly_and_over_half_are_found() -> None:
    measured = score(MODEL, load_pairs())
    assert measured.precision >= 0.99 and measured.different > 150
    assert measured.recall > 0.5


def test_the_model_is_small() -> None:
    assert (FOLDER / FILE_NAME).stat().st_size < 2 << 20


@pytest.mark.parametrize(
    "lead", ["What happens in volume {}?", "How much is volume {} of Monster?", "{}巻の値段は？"]
)
@given(one=st.integers(0, 10_000), other=st.integers(0, 10_000))
def test_numbers_must_be_equal(lead: str, one: int, other: int) -> None:
    assume(one != other)
    assert not same(lead.format(one), lead.format(other))
    assert same(lead.format(one), lead.format(one))


@given(
    st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=8),
    st.text("bcdfgjkpqvwxz", min_size=4, max_size=8),
)
def test_names_must_be_equal(one: str, other: str) -> None:
    assume(one != other and one.rstrip("s") != other.rstrip("s"))
    assert not same(f"Who created {one.capitalize()}?", f"Who created {other.capitalize()}?")


@given(st.text(max_size=60))
def test_any_text_can_be_read_and_means_the_same_as_itself(text: str) -> None:
    meaning = MODEL.meaning(text)
    if meaning is not None:
        assert meaning.similarity(meaning.vector) == pytest.approx(1.0)
        assert same(text, text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Please cancel my order.", "Please don't cancel my order."),
        ("Can I pay with PayPal?", "Can I pay without PayPal?"),
        ("Is Naruto longer than Bleach?", "Is Bleach longer than Naruto?"),
        ("Trains from Bern to Basel", "Trains from Basel to Bern"),
        ("Do you ship to Spain?", "Do you ship from Spain?"),
        ("Who wrote 'Monster'?", "Who wrote 'Nana'?"),
        ("Who created Monster?", "モンスターの作者は誰ですか？"),
        ("犬は入れますか？", "犬は入れませんか？"),
        ("東京から大阪まで", "大阪から東京まで"),
    ],
)
def test_what_turns_a_question_around_is_seen(one: str, other: str) -> None:
    assert not same(one, other)


def test_a_title_spelled_like_a_word_is_a_name() -> None:
    assert not same("How much is Order?", "How much is Delivery?")


def test_quotation_marks_and_politeness_do_not_matter() -> None:
    assert same('hello, who wrote "Dune"?', "Who wrote Dune?")
    assert same("HOW MUCH IS SHIPPING?", "how much is shipping")


def test_nothing_and_too_much_mean_nothing() -> None:
    assert MODEL.meaning("") is None and MODEL.meaning("  \n") is None and MODEL.meaning("?!") is None
    assert MODEL.meaning("a" * (MAX_CHARS + 1)) is None


def test_a_threshold_of_the_operator_takes_the_place_of_the_model_s() -> None:
    strict = WordEmbedding.from_folder(FOLDER, threshold=0.99)
    meaning = strict.meaning("Who created Berserk?")
    assert meaning is not None and meaning.threshold == 0.99


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 2}',
        json.dumps({"format": 1, "dimensions": 2, "threshold": 1, "strict": 1, "words": {"a": "AA=="}}),
        json.dumps({"format": 1, "dimensions": 1, "threshold": 1, "strict": 1, "words": {"a": "%"}}),
    ],
)
def test_a_folder_without_a_model_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(EmbeddingError, match=FILE_NAME):
        WordEmbedding.from_folder(tmp_path)
    with pytest.raises(EmbeddingError, match="gone"):
        WordEmbedding.from_folder(tmp_path / "gone")
