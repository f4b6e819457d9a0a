from __future__ import annotations

from budgeting.sections import arrange, evidence_text, exchanges, latest_turn, prompt_messages
from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role

USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM
SAGA = EvidenceChunk("manga_441", "catalog", "Vinland Saga, volume 1", 0.9)
REVIEW = EvidenceChunk("r_2", "review", "Great art.", 0.5)


def turns(roles: str) -> tuple[Message, ...]:
    named = {"u": USER, "a": ASSISTANT, "t": Role.TOOL}
    return tuple(Message(named[role], f"{role}{at}") for at, role in enumerate(roles))


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
    assert found.cuts == (2, 2, 4, 5)
    assert prompt_messages(CanonicalPrompt(turns=turns("u"))) == turns("u")


def test_a_prompt_of_nothing_is_no_messages() -> None:
    assert prompt_messages(CanonicalPrompt()) == ()
    assert arrange(CanonicalPrompt(system=("S",), context="a: 1"), ()).cuts == (1, 1, 1, 2)


def test_words_beside_a_tools_result_leave_the_result_in_the_latest_turn() -> None:
    talk = turns("uauatu")
    assert latest_turn(talk) == 2
    assert exchanges(talk) == [0]


def test_the_latest_turn_starts_at_the_last_user_message() -> None:
    assert [latest_turn(turns(roles)) for roles in ("u", "uau", "uaua", "aa", "")] == [0, 2, 2, 1, 0]


def test_an_exchange_is_a_user_message_with_its_answers() -> None:
    assert exchanges(turns("uauu")) == [0, 2]
    assert exchanges(turns("auaaau")) == [0, 1]
    assert exchanges(turns("u")) == []


def test_the_summary_stands_behind_the_system_part_and_before_the_turns() -> None:
    prompt = CanonicalPrompt(system=("S",), turns=turns("uauau"))
    found = arrange(prompt, [SAGA], first_turn=2, summary="user: u0")
    assert found.messages[1] == Message(SYSTEM, "Earlier in this conversation:\nuser: u0")
    assert [message.role for message in found.messages] == [SYSTEM, SYSTEM, USER, ASSISTANT, SYSTEM, USER]
    assert found.cuts == (1, 2, 4, 5)
