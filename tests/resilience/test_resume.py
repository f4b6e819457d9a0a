"""Resume points: the kept part of a broken answer and its rest are the whole answer, for every split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.resume import (
    Mismatch,
    ResumeMode,
    ResumePoint,
    Splice,
    align,
    plan_resumption,
    tokens_of_text,
)

# Ids stand for bytes, as in a byte-level vocabulary; 0 is a control token and has no text.
VOCABULARY = (
    b"", b"a", b"b", b" word", b"END", b" EN", b"D", b"x\xe3", b"\xe3", b"\x81", b"\x82", b"\x82y z",
    "あ".encode(), "い".encode()[:2], "い".encode()[2:], "🐉".encode()[:1], "🐉".encode()[1:], "é".encode(),
)  # fmt: skip


# Every way in which these ids make whole characters, and each of them with a control token inside.
WHOLES = [
    *([number] for number in (0, 1, 2, 3, 4, 5, 6, 12, 17)),
    *([one, two, three] for one in (7, 8) for two in (9,) for three in (10, 11, 14)),
    *([13, last] for last in (10, 11, 14)),
    [15, 16],
    *([one, 0, 9, 0, 10] for one in (7, 8)),
    [15, 0, 16],
]


def bytes_of(token_id: int) -> bytes:
    return VOCABULARY[token_id]


def decoded(ids: Sequence[int]) -> bytes:
    return b"".join(map(bytes_of, ids))


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], str]:
    """Draws token ids that decode to whole characters, and their text."""
    ids = [one for whole in draw(st.lists(st.sampled_from(WHOLES), max_size=12)) for one in whole]
    return ids, decoded(ids).decode()


def test_tokens_whose_text_was_all_delivered_are_all_kept() -> None:
    assert align([1, 3], "a word", bytes_of) == ResumePoint((1, 3))


def test_tokens_after_the_delivered_text_are_dropped() -> None:
    assert align([1, 3, 5], "a word", bytes_of) == ResumePoint((1, 3))


def test_the_rest_of_a_token_that_was_delivered_in_part_is_held() -> None:
    assert align([1, 3, 5], "a wo", bytes_of) == ResumePoint((1, 3), held="rd")


def test_a_control_token_behind_the_text_does_not_stay() -> None:
    assert align([1, 3, 0], "a word", bytes_of) == ResumePoint((1, 3))


def test_a_token_that_ends_inside_a_character_is_generated_again() -> None:
    point = align([1, 7], "ax", bytes_of)
    assert point == ResumePoint((1,), repeated="x")
    assert point.covered("ax") == "a"


def test_tokens_without_a_text_of_their_own_at_the_end_are_not_counted() -> None:
    assert tokens_of_text([1, 3, 0], "a word", bytes_of) == 2
    assert tokens_of_text([1, 3, 5], "a word", bytes_of) == 2
    assert tokens_of_text([1, 3], "", bytes_of) == 0


def test_without_a_vocabulary_for_the_text_all_tokens_are_counted() -> None:
    assert tokens_of_text([1, 3, 0], "a word", lambda _: b"") == 3
    assert tokens_of_text([2, 3, 0], "a word", bytes_of) == 3


END = 99


class Bytes:
    """A tokenizer with the ids of the vocabulary, a control token, and ids from 100 on for single bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == END:
            return b"<end>"
        return bytes_of(token_id) if token_id < 100 else bytes([token_id - 100])

    def text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == END else self.token_bytes(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(100 + byte for byte in text.encode())


@pytest.mark.parametrize("text", ["a word", "a<end> word"])
def test_an_answer_past_the_models_end_goes_on_after_its_own_ids(text: str) -> None:
    resumption = plan_resumption(
        (ResumeMode.EXACT, ResumeMode.SPELLED), text, [1, END, 3], (), Bytes(), tokens=3
    )
    assert resumption is not None
    assert (resumption.mode, resumption.token_ids) == (ResumeMode.EXACT, (1, END, 3))


@pytest.mark.parametrize(
    ("repeats", "mode", "ids"), [(True, ResumeMode.EXACT, (1,)), (False, ResumeMode.SPELLED, (197, 220))]
)
def test_tokens_that_are_sampled_anew_are_never_compared_with_the_delivered_text(
    repeats: bool, mode: ResumeMode, ids: tuple[int, ...]
) -> None:
    modes = (ResumeMode.EXACT, ResumeMode.SPELLED)
    resumption = plan_resumption(modes, "ax", [1, 7], (), Bytes(), tokens=2, repeats=repeats)
    assert resumption is not None
    assert (resumption.mode, resumption.token_ids) == (mode, ids)
    assert resumption.splice.joined is not repeats


def test_ids_are_dropped_back_to_where_a_character_ends() -> None:
    assert align([1, 8, 9, 11], "aあy", bytes_of) == ResumePoint((1, 8, 9, 11), held=" z")
    assert align([1, 8, 9], "aあ", bytes_of) == ResumePoint((1,), repeated="あ")


def test_nothing_delivered_keeps_nothing() -> None:
    assert align([5, 6], "", bytes_of) == ResumePoint(())


@pytest.mark.parametrize("text", ["b", "ab", "a wa", "A word"])
def test_ids_of_another_answer_have_no_resume_point(text: str) -> None:
    assert align([1, 3], text, bytes_of) is None


def test_the_start_of_a_stop_string_is_held_until_it_is_known_not_to_be_one() -> None:
    splice = Splice(ResumePoint((1,), held=" EN"), ("END",), bytes_of)
    assert splice.take("", (6,)) == ""
    assert splice.end() == " "
    splice = Splice(ResumePoint((1,), held=" EN"), ("END",), bytes_of)
    assert splice.take("", ()) == ""
    assert splice.end() == " EN"
    splice = Splice(ResumePoint((1,), held=" EN"), ("END",), bytes_of)
    assert splice.take("b", (2,)) == " ENb"
    assert splice.end() == ""


def test_what_is_generated_again_must_be_what_was_delivered() -> None:
    splice = Splice(ResumePoint((), repeated="ab"))
    assert splice.take("a") == ""
    assert not splice.joined
    with pytest.raises(Mismatch):
        splice.take("c")
    with pytest.raises(Mismatch):
        Splice(ResumePoint((), repeated="ab")).end()


@given(answers(), st.data())
def test_what_is_kept_and_what_follows_are_the_whole_answer(
    answer: tuple[list[int], str], data: st.DataObject
) -> None:
    ids, text = answer
    known = data.draw(st.integers(0, len(ids)), label="tokens known")
    most = len(decoded(ids[:known]).decode(errors="ignore"))
    given_text = text[: data.draw(st.integers(0, most), label="characters delivered")]
    point = align(ids[:known], given_text, bytes_of)
    assert point is not None
    assert list(point.token_ids) == ids[: len(point.token_ids)]
    assert decoded(point.token_ids).decode() == point.covered(given_text)
    assert not (point.held and point.repeated)
    # The continuation gives the rest of the text in pieces of any size.
    splice, rest, out = Splice(point), text[len(point.covered(given_text)) :], given_text
    while rest:
        size = data.draw(st.integers(1, len(rest)), label="piece")
        out, rest = out + splice.take(rest[:size]), rest[size:]
    assert out + splice.end() == text


@given(answers(), st.data())
def test_no_fewer_tokens_would_cover_the_text(answer: tuple[list[int], str], data: st.DataObject) -> None:
    ids, text = answer
    given_text = text[: data.draw(st.integers(0, len(text)), label="characters delivered")]
    point = align(ids, given_text, bytes_of)
    assert point is not None
    if point.token_ids and not point.repeated:
        assert len(decoded(point.token_ids[:-1])) < len(given_text.encode())


@given(answers(), st.data())
def test_a_second_break_before_the_first_seam_is_closed_loses_nothing(
    answer: tuple[list[int], str], data: st.DataObject
) -> None:
    ids, text = answer
    given_text = text[: data.draw(st.integers(0, len(text)), label="characters delivered")]
    first = align(ids, given_text, bytes_of)
    assert first is not None
    # The continuation breaks after some tokens, all of whose text was given again or held back.
    more = data.draw(st.integers(0, len(ids) - len(first.token_ids)), label="tokens of the continuation")
    known = ids[: len(first.token_ids) + more]
    whole = decoded(known).decode(errors="ignore")
    now = whole if len(whole) > len(given_text) else given_text
    second = align(known, now, bytes_of)
    assert second is not None
    assert text.startswith(now)
    assert decoded(second.token_ids).decode() == second.covered(now)
