"""Token ids stored in pieces behave like one tuple."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from budgeting.token_ids import PieceIds, joined, leading

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
