from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from budgeting.duplicates import MAX_FOLDED_CHARS, merge_chunks, same_text
from budgeting.values import EvidenceChunk
from tests.budgeting import strategies

LONG = "Vinland Saga, volume 1, hardcover, in stock, ships within two days."


def chunk(name: str, text: str, score: float | None = None) -> EvidenceChunk:
    return EvidenceChunk(name, "catalog", text, score)


def test_chunks_are_ranked_by_score_and_then_by_the_callers_order() -> None:
    scores = [None, 0.1, 0.9, 0.1, math.nan]
    merged = merge_chunks([chunk(f"c{i}", f"t{i}", score) for i, score in enumerate(scores)])
    assert merged.ranked == (2, 1, 3, 0, 4)


def test_duplicates_by_id_or_by_text_are_merged_into_the_best() -> None:
    merged = merge_chunks(
        [
            chunk("a", "one", 0.1),
            chunk("b", "two", 0.5),
            chunk("a", "another one", 0.7),
            chunk("c", "two", 0.2),
        ]
    )
    assert [one.text for one in merged.kept] == ["two", "another one"]
    assert merged.ids == (("b", "c"), ("a",))


def test_case_width_and_blanks_make_no_difference() -> None:
    merged = merge_chunks([chunk("a", "Vinland  Saga\n１", 0.5), chunk("b", "vinland saga 1 ", 0.4)])
    assert merged.ids == (("a", "b"),)
    assert merged.kept[0].text == "Vinland  Saga\n１"


def test_a_text_inside_another_is_merged_into_the_longer_one_at_the_better_rank() -> None:
    merged = merge_chunks(
        [
            chunk("part", "volume 1, hardcover, in stock", 0.9),
            chunk("x", "else", 0.5),
            chunk("all", LONG, 0.1),
        ]
    )
    assert [one.chunk_id for one in merged.kept] == ["x", "all"]
    assert merged.ids == (("x",), ("all", "part"))
    assert merged.ranked == (1, 0)


def test_a_few_words_inside_another_text_are_no_duplicate() -> None:
    assert len(merge_chunks([chunk("a", "in stock", 0.5), chunk("b", LONG, 0.9)]).kept) == 2


def test_a_dropped_chunk_removes_no_chunk_with_an_equal_text() -> None:
    merged = merge_chunks(
        [chunk("a", "the one that is shown", 0.9), chunk("a", "the other", 0.8), chunk("b", "the other", 0.1)]
    )
    assert [one.text for one in merged.kept] == ["the one that is shown", "the other"]


def test_nothing_and_one_chunk_are_left_alone() -> None:
    assert merge_chunks([]).kept == ()
    assert merge_chunks([chunk("a", "t")]).ids == (("a",),)


@given(chunks=st.lists(strategies.chunks, max_size=12))
def test_every_id_is_listed_once_and_every_text_is_sent(chunks: list[EvidenceChunk]) -> None:
    merged = merge_chunks(chunks)
    assert sorted(name for ids in merged.ids for name in ids) == sorted({c.chunk_id for c in chunks})
    assert sorted(merged.ranked) == list(range(len(merged.kept)))
    places = [chunks.index(one) for one in merged.kept]
    assert places == sorted(places)
    shown = [same_text(one.text) for one in merged.kept]
    assert len(set(shown)) == len(shown)
    names = [one.chunk_id for one in merged.kept]
    for one in chunks:  # id kept, or text inside a kept chunk that lists the id, or id not unique
        holders = [text for text, ids in zip(shown, merged.ids, strict=True) if one.chunk_id in ids]
        assert (
            one.chunk_id in names
            or any(same_text(one.text) in text for text in holders)
            or _twice(chunks, one)
        )


def _twice(chunks: list[EvidenceChunk], one: EvidenceChunk) -> bool:
    return sum(other.chunk_id == one.chunk_id for other in chunks) > 1


def test_evidence_beyond_the_bound_in_all_its_chunks_is_compared_as_it_is_written() -> None:
    long = "Vinland " * (MAX_FOLDED_CHARS // 16)
    many = [chunk("a", long), chunk("b", long.lower()), chunk("c", long)]
    assert len(merge_chunks(many[:2]).kept) == 1
    assert len(merge_chunks(many).kept) == 2
