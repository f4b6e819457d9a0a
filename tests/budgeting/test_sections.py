from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from budgeting.sections import arrange, evidence_text, exchanges, latest_turn, merge_chunks, prompt_messages
from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role
from tests.budgeting import strategies

USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM
SAGA = EvidenceChunk("manga_441", "catalog", "Vinland Saga, volume 1", 0.9)
REVIEW = EvidenceChunk("r_2", "review", "Great art.", 0.5)


def turns(roles: str) -> tuple[Message, ...]:
    return tuple(Message(USER if role == "u" else ASSISTANT, f"{role}{at}") for at, role in enumerate(roles))


def test_evidence_and_context_are_written_in_one_fixed_form() -> None:
    assert evidence_text([SAGA, REVIEW], "locale: ja\nname: Aiko") == (
        "Evidence:\n[catalog manga_441] Vinland Saga, volume 1\n[review r_2] Great art.\n\n"
        "Context:\nlocale: ja\nname: Aiko"
    )


def test_only_the_parts_that_exist_are_written() -> None:
    assert evidence_text([SAGA], "") == "Evidence:\n[catalog manga_441] Vinland Saga, volume 1"
    assert evidence_text([], "locale: ja") == "Context:\nlocale: ja"
    assert evidence_text([], "") == ""


def test_evidence_stands_just_before_the_latest_user_turn() -> None:
    prompt = CanonicalPrompt(system=("S1", "S2"), turns=turns("uau"), context="locale: ja")
    found = arrange(prompt, [SAGA])
    assert [message.role for message in found.messages] == [SYSTEM, SYSTEM, USER, ASSISTANT, SYSTEM, USER]
    assert found.cuts == (2, 4, 5)
    assert prompt_messages(CanonicalPrompt(turns=turns("u"))) == turns("u")


def test_a_prompt_of_nothing_is_no_messages() -> None:
    assert prompt_messages(CanonicalPrompt()) == ()
    assert arrange(CanonicalPrompt(system=("S",), context="a: 1"), ()).cuts == (1, 1, 2)


def test_the_latest_turn_starts_at_the_last_user_message() -> None:
    assert [latest_turn(turns(roles)) for roles in ("u", "uau", "uaua", "aa", "")] == [0, 2, 2, 1, 0]


def test_an_exchange_is_a_user_message_with_its_answers() -> None:
    assert exchanges(turns("uauu")) == [0, 2]
    assert exchanges(turns("auaaau")) == [0, 1]
    assert exchanges(turns("u")) == []


def test_chunks_are_ranked_by_score_and_then_by_the_callers_order() -> None:
    scores = [None, 0.1, 0.9, 0.1, math.nan]
    merged = merge_chunks([EvidenceChunk(f"c{i}", "s", f"t{i}", score) for i, score in enumerate(scores)])
    assert merged.ranked == (2, 1, 3, 0, 4)


def test_duplicates_by_id_or_by_text_are_merged_into_the_best() -> None:
    merged = merge_chunks(
        [
            EvidenceChunk("a", "catalog", "one", 0.1),
            EvidenceChunk("b", "catalog", "two", 0.5),
            EvidenceChunk("a", "review", "another one", 0.7),
            EvidenceChunk("c", "catalog", "two", 0.2),
        ]
    )
    assert [chunk.text for chunk in merged.kept] == ["two", "another one"]
    assert merged.ids == (("b", "c"), ("a",))


@given(chunks=st.lists(strategies.chunks, max_size=12))
def test_merging_keeps_each_id_and_each_text_once(chunks: list[EvidenceChunk]) -> None:
    merged = merge_chunks(chunks)
    assert len({chunk.text for chunk in merged.kept}) == len(merged.kept)
    assert sorted(name for ids in merged.ids for name in ids) == sorted({c.chunk_id for c in chunks})
    assert sorted(merged.ranked) == list(range(len(merged.kept)))
    assert [chunk for chunk in chunks if chunk in merged.kept][: len(merged.kept)] or not chunks
