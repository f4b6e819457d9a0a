"""Token ids stored in pieces behave like one tuple."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from budgeting.token_ids import PerPiece, PieceIds, joined, leading

PIECES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=5)


@given(PIECES, st.integers(0, 25))
def test_ids_in_pieces_equal_their_joined_tuple(pieces: list[tuple[int, ...]], count: int) -> None:
    whole = tuple(one for piece in pieces for one in piece)
    ids = PieceIds(pieces, len(whole))
    assert (len(ids), list(ids), joined(ids)) == (len(whole), list(whole), whole)
    assert ids == whole and whole == ids and hash(ids) == hash(whole) and ids == PieceIds([whole], len(whole))
    assert ids != (*whole, 1) and ids != list(whole)
    assert whole[:count] == ids[:count] == leading(whole, count)[0]
    assert tuple(one for piece in leading(ids, count) for one in piece) == whole[:count]


def test_the_pieces_of_a_prefix_are_not_copied() -> None:
    system, tools = (1, 2, 3), (4, 5)
    found = leading(PieceIds([system, tools, (6,)], 6), 5)
    assert found == (system, tools) and found[0] is system and found[1] is tools


@given(st.lists(PIECES, max_size=6))
def test_what_is_made_of_each_piece_is_made_once(prompts: list[list[tuple[int, ...]]]) -> None:
    made: list[tuple[int, ...]] = []

    def make(piece: tuple[int, ...]) -> str:
        made.append(piece)
        return str(piece)

    cached = PerPiece(make, 1 << 20)
    for pieces in prompts:
        assert cached.of(PieceIds(pieces, 0)) == list(map(str, pieces))
    made.clear()
    for pieces in prompts:
        assert cached.of(PieceIds(pieces, 0)) == list(map(str, pieces))
    assert made == []


def test_a_piece_is_not_mistaken_for_one_that_had_its_place_in_memory() -> None:
    cached = PerPiece(sum, 4_096)  # bounded: older pieces are freed, and their memory is used again
    for number in range(10_000):
        assert cached.of(PieceIds([(number, 1)], 2)) == [number + 1]


def test_ids_without_pieces_are_not_cached() -> None:
    made: list[tuple[int, ...]] = []
    cached = PerPiece(made.append, 1 << 20)
    cached.of((1, 2))
    cached.of((1, 2))
    assert made == [(1, 2), (1, 2)]
