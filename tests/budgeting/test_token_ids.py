"""Token ids stored in pieces behave like one tuple."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from budgeting.token_ids import PieceIds, first, joined

PIECES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=5)


@given(PIECES, st.integers(0, 25))
def test_ids_in_pieces_equal_their_joined_tuple(pieces: list[tuple[int, ...]], count: int) -> None:
    whole = tuple(one for piece in pieces for one in piece)
    ids = PieceIds(pieces, len(whole))
    assert (len(ids), list(ids), joined(ids)) == (len(whole), list(whole), whole)
    assert ids == whole and whole == ids and hash(ids) == hash(whole) and ids == PieceIds([whole], len(whole))
    assert ids != (*whole, 1) and ids != list(whole)
    assert first(ids, count) == first(whole, count) == whole[:count] == ids[:count]


def test_a_prefix_that_is_a_piece_is_not_copied() -> None:
    system = (1, 2, 3)
    assert first(PieceIds([system, (4,)], 4), 3) is system
