"""Degenerate answers are found soon, however they are split into pieces; ordinary text is left alone."""

from __future__ import annotations

import random
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.degenerate import CHARS_PER_TOKEN, DegenerateLimits, Detector, Sign

LIMITS = DegenerateLimits(repeat_tokens=40, cycle_tokens=64, cycle_length=8)
DOCS = Path(__file__).resolve().parents[2] / "docs"


def found_at(ids: list[int], limits: DegenerateLimits = LIMITS, pieces: int = 1) -> int | None:
    """Returns after how many tokens repetition is found, in pieces of ``pieces`` tokens; None if never."""
    detector = Detector(limits)
    for start in range(0, len(ids), pieces):
        piece = tuple(ids[start : start + pieces])
        if detector.take("", len(piece), piece) is not None:
            return start + len(piece)
    return None


def ordinary(count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("period", range(1, 9))
@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_a_cycle_is_found_soon_after_it_is_long_enough(period: int, pieces: int) -> None:
    ids = ordinary(100) + list(islice(cycle(range(period)), 400))
    at = found_at(ids, pieces=pieces)
    long_enough = 100 + (LIMITS.repeat_tokens if period == 1 else LIMITS.cycle_tokens)
    assert at is not None and long_enough <= at <= long_enough + period + pieces


def test_a_longer_cycle_is_left_alone() -> None:
    assert found_at(list(islice(cycle(range(9)), 2000))) is None


@given(
    before=st.lists(st.integers(0, 3), max_size=100),
    run=st.lists(st.integers(0, 1), min_size=1, max_size=8),
    length=st.integers(0, 64 - 1),
)
@settings(max_examples=25)
def test_a_repetition_that_ends_before_the_limit_is_left_alone(
    before: list[int], run: list[int], length: int
) -> None:
    ids = before + list(islice(cycle(run), length)) + ordinary(200, seed=len(before))
    limits = DegenerateLimits(repeat_tokens=200, cycle_tokens=200, cycle_length=8)
    # The random tokens 0 to 3 and the run after them are together shorter than the limit.
    assert found_at(ids, limits) is None


@given(ids=st.lists(st.integers(0, 2), max_size=400), pieces=st.integers(1, 50))
@settings(max_examples=25)
def test_what_is_found_does_repeat(ids: list[int], pieces: int) -> None:
    at = found_at(ids, pieces=pieces)
    if at is not None:
        tail = ids[:at]
        assert any(
            tail[-over:][period:] == tail[-over:][:-period]
            for period in range(1, 9)
            for over in (LIMITS.repeat_tokens if period == 1 else LIMITS.cycle_tokens,)
        )


def test_a_text_that_repeated_itself_and_went_on_is_left_alone() -> None:
    ids = [7] * 60 + ordinary(40)
    detector = Detector(LIMITS)
    assert detector.take("", len(ids), tuple(ids)) is None


@pytest.mark.parametrize("unit", ["a", "ab ", "no, ", "I am sorry. I am sorry for that.", "\n"])
@pytest.mark.parametrize("chars", [1, 5, 31, 33, 130])
def test_without_token_ids_the_text_is_judged_by_its_characters(unit: str, chars: int) -> None:
    detector = Detector(LIMITS)
    over = LIMITS.cycle_tokens * CHARS_PER_TOKEN
    text = "It began well. " + unit * (over // len(unit) + 400)
    at = next(
        at + chars
        for at in range(0, len(text), chars)
        if detector.take(text[at : at + chars], 1, ()) is Sign.REPETITION
    )
    assert over <= at <= 15 + over + len(unit) + 2 * chars


def test_once_a_piece_comes_without_ids_the_text_is_judged() -> None:
    detector = Detector(LIMITS)
    assert detector.take("x", 1, (7,)) is None
    assert detector.take("x", 1, ()) is None
    assert all(detector.take("x", 1, (7,)) is None for _ in range(LIMITS.repeat_tokens * 2))
    assert any(detector.take("x", 1, (7,)) for _ in range(LIMITS.cycle_tokens * CHARS_PER_TOKEN))


def test_replacement_characters_close_together_are_found_in_whatever_pieces() -> None:
    for size in (1, 2, 5, 40):
        detector = Detector(DegenerateLimits(replacement_chars=3, replacement_window=8))
        text = "fine \ufffd and \ufffd here, then \ufffd\ufffd..\ufffd"
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        signs = [detector.take(piece, 1, (at,)) for at, piece in enumerate(pieces)]
        assert signs[-1] is Sign.REPLACEMENT and set(signs[:-1]) <= {None}


@given(places=st.sets(st.integers(0, 80), max_size=30), size=st.integers(1, 20))
def test_replacement_characters_are_found_exactly_when_a_window_holds_too_many(
    places: set[int], size: int
) -> None:
    limits = DegenerateLimits(replacement_chars=4, replacement_window=10)
    text = "".join("\ufffd" if at in places else "x" for at in range(81))
    detector = Detector(limits)
    found = any(detector.take(text[at : at + size], 1, (at,)) for at in range(0, 81, size))
    assert found == any(text[at : at + 10].count("\ufffd") >= 4 for at in range(81))


def test_replacement_characters_are_not_looked_at_when_that_is_switched_off() -> None:
    detector = Detector(DegenerateLimits(replacement_chars=0))
    assert detector.take("\ufffd" * 100, 1, (1,)) is None


def test_the_default_leaves_ordinary_text_alone() -> None:
    for page in sorted(DOCS.glob("*.md")):
        text, detector = page.read_text(encoding="utf-8"), Detector(DegenerateLimits())
        for at in range(0, len(text), 4):
            piece = text[at : at + 4]
            assert detector.take(piece, 1, ()) is None, page.name


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"cycle_tokens": 15}, "cycle_tokens"),
        ({"replacement_chars": 33}, "replacement_chars"),
    ],
)
def test_limits_that_make_no_sense_are_refused_with_what_is_allowed(
    wrong: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{named} is .*; allowed: "):
        DegenerateLimits(**wrong)
