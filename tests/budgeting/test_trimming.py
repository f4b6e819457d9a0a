from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from budgeting.trimming import TrimCandidate, largest_that_fits, offers
from budgeting.values import PromptSection


def order(
    chunks: list[int], turns: list[int], *, evidence_room: int = 100, turns_room: int = 100, **rest: Any
) -> list[str]:
    found = offers(
        ranked_chunks=range(len(chunks)),
        exchange_starts=range(len(turns)),
        chunk_tokens=chunks.__getitem__,
        exchange_tokens=turns.__getitem__,
        evidence_room=evidence_room,
        turns_room=turns_room,
        **rest,
    )
    return [_name(offer) for offer in found]


def _name(offer: TrimCandidate) -> str:
    if offer.summary:
        return f"summary of {offer.tokens}"
    if offer.chunk is None:
        return f"turn {offer.first_turn}"
    return f"chunk {offer.chunk}" if offer.text is None else f"{offer.text} of chunk {offer.chunk}"


def half(position: int, room: int) -> tuple[str, int] | None:
    """A cut of 40 tokens, or None if there is less room."""
    return ("half", 40) if room >= 40 else None


def test_each_section_gets_its_own_room_and_evidence_borrows_before_old_turns() -> None:
    assert order([60, 40, 30], [50, 50, 60]) == [
        "chunk 0", "chunk 1", "turn 2", "chunk 2", "turn 1", "turn 0",
    ]  # fmt: skip


def test_a_chunk_that_exceeds_its_section_alone_waits_for_the_others() -> None:
    assert order([500, 60, 60], [50]) == ["chunk 1", "turn 0", "chunk 2", "chunk 0"]


def test_a_chunk_that_exceeds_its_section_alone_is_cut_in_its_place_and_completed_last() -> None:
    assert order([30, 500, 50, 20], [50], cut=half) == [
        "chunk 0", "half of chunk 1", "turn 0", "chunk 2", "chunk 3", "chunk 1",
    ]  # fmt: skip
    assert order([70, 500, 20], [], cut=half) == ["chunk 0", "chunk 2", "chunk 1"]


def test_the_summary_comes_when_both_sections_are_full_and_before_anything_borrows() -> None:
    assert order([60, 60], [60, 60], summary_room=80) == [
        "chunk 0", "turn 1", "summary of 80", "chunk 1", "turn 0",
    ]  # fmt: skip


def test_spare_tokens_flow_in_the_declared_order() -> None:
    sections = (PromptSection.RECENT_TURNS, PromptSection.RETRIEVAL)
    assert order([60, 60], [60, 60], spare=sections) == ["chunk 0", "turn 1", "turn 0", "chunk 1"]


def test_a_section_that_is_not_named_never_borrows() -> None:
    assert order([60, 60], [60, 60], spare=(PromptSection.RECENT_TURNS,)) == ["chunk 0", "turn 1", "turn 0"]
    assert order([60, 60], [60, 60], spare=()) == ["chunk 0", "turn 1"]


def test_a_section_without_room_of_its_own_only_borrows() -> None:
    assert order([10], [10, 10], evidence_room=-5, turns_room=0) == ["chunk 0", "turn 1", "turn 0"]


def test_turns_that_are_not_reached_are_not_counted() -> None:
    counted: list[int] = []

    def count(place: int) -> int:
        counted.append(place)
        return 10

    found = offers(
        ranked_chunks=[],
        exchange_starts=range(1000),
        chunk_tokens=count,
        exchange_tokens=count,
        evidence_room=0,
        turns_room=1_000_000,
    )
    next(found)
    next(found)
    assert counted == [999, 998]


@given(
    chunks=st.lists(st.integers(1, 50), max_size=8),
    turns=st.lists(st.integers(1, 50), max_size=8),
    evidence_room=st.integers(-5, 120),
    turns_room=st.integers(-5, 120),
)
def test_everything_is_offered_once_and_old_turns_never_before_newer_ones(
    chunks: list[int], turns: list[int], evidence_room: int, turns_room: int
) -> None:
    found = order(chunks, turns, evidence_room=evidence_room, turns_room=turns_room)
    assert sorted(found) == sorted(
        [f"chunk {i}" for i in range(len(chunks))] + [f"turn {i}" for i in range(len(turns))]
    )
    starts = [int(name.split()[1]) for name in found if name.startswith("turn")]
    assert starts == sorted(starts, reverse=True)


@given(most=st.integers(0, 300), answer=st.integers(0, 300), guess=st.integers(-5, 310))
def test_the_search_finds_the_largest_that_fits(most: int, answer: int, guess: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= answer

    assert largest_that_fits(guess, most, fits) == min(answer, most)
    assert all(0 < number <= most for number in asked)
    if guess == answer < most:
        assert len(asked) <= 2
