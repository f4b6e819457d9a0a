"""The dialogue generator: reproducible, consistent with the catalogue, disjoint from the evaluation."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest

from evaluation.demo_eval import load_questions
from models.catalogue import by_author, load_catalogue, similar_to
from models.dialogues import Mix, dialogues, make_dialogue
from models.held_out import held_out_pairs
from models.spin import say, spin
from models.tokenizer import CALL_START
from models.tool_dialogues import Message
from models.turns_en import Facts, pick_series_turn, series_answer
from models.turns_ja import pick_series_turn_ja


@pytest.fixture(scope="module")
def sample() -> list[list[Message]]:
    return list(islice(dialogues(seed=2024), 6_000))


def normalised(text: str) -> str:
    """Return the text in lower case without punctuation, so that a changed mark does not hide a repeated question."""
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


def last_line(message: Message) -> str:
    """Return the question itself, which follows any evidence in the user message."""
    return normalised(message["content"].split("\n")[-1])


def test_the_same_seed_gives_the_same_dialogues() -> None:
    assert list(islice(dialogues(seed=5), 200)) == list(islice(dialogues(seed=5), 200))


def test_another_seed_gives_other_dialogues() -> None:
    assert list(islice(dialogues(seed=5), 20)) != list(islice(dialogues(seed=6), 20))


def test_no_held_out_question_is_ever_asked_in_training(sample: list[list[Message]]) -> None:
    held_out = {normalised(question.messages[-1]["content"].split("\n")[-1]) for question in load_questions()}
    asked = {last_line(message) for dialogue in sample for message in dialogue if message["role"] == "user"}
    assert len(asked) > 5_000
    assert not held_out & asked


def test_no_evidence_line_of_the_evaluation_occurs_in_training(sample: list[list[Message]]) -> None:
    invented = (
        "Paper Lanterns of Kyo",
        "Mapmaker's Cat",
        "Rust and Petals",
        "Tidewater High",
        "Glass Monsoon",
    )
    text = "\n".join(message["content"] for dialogue in sample for message in dialogue)
    assert not [title for title in invented if title in text]


def test_held_out_pairs_of_series_and_question_are_never_drawn() -> None:
    rng = random.Random(3)
    for _ in range(4000):
        for turn in (pick_series_turn(Facts(), rng), pick_series_turn_ja(Facts(), rng)):
            if turn.focus and turn.kind != "like":
                assert (turn.focus.title, turn.kind) not in held_out_pairs()


def test_held_out_pairs_name_series_of_the_catalogue() -> None:
    assert {title for title, _ in held_out_pairs()} <= {series.title for series in load_catalogue()}


def test_turns_alternate_and_end_with_the_assistant(sample: list[list[Message]]) -> None:
    for dialogue in sample[:3000]:
        roles = [message["role"] for message in dialogue]
        turns = [role for role in roles if role != "system"]
        assert roles[: len(roles) - len(turns)] == ["system"] * (len(roles) - len(turns))
        called = [place for place, role in enumerate(turns) if role == "tool"]
        # A call and its result stand between a question and its answer.
        assert all(
            turns[place - 2 : place + 2] == ["user", "assistant", "tool", "assistant"] for place in called
        )
        kept = [role for place, role in enumerate(turns) if not {place, place + 1} & set(called)]
        assert kept == ["user", "assistant"] * (len(kept) // 2)
        assert turns


def test_every_prompt_shape_of_the_service_occurs(sample: list[list[Message]]) -> None:
    systems = [[m["content"] for m in dialogue if m["role"] == "system"] for dialogue in sample]
    users = [dialogue[len(texts)]["content"] for dialogue, texts in zip(sample, systems, strict=True)]
    shares = {
        "no system message": sum(not texts for texts in systems),
        "several system messages": sum(len(texts) > 1 for texts in systems),
        "evidence in a system message": sum("manga_" in "".join(texts) for texts in systems),
        "evidence in the user message": sum("manga_" in user for user in users),
        "Japanese": sum(re.search(r"[\u3040-\u30ff]", user) is not None for user in users),
        "several turns": sum(
            len(dialogue) - len(texts) > 2 for dialogue, texts in zip(sample, systems, strict=True)
        ),
        "a long prompt": sum(sum(map(len, texts)) > 2000 for texts in systems),
    }
    assert {name: count for name, count in shares.items() if count < 0.01 * len(sample)} == {}


def test_no_template_mark_is_left_in_the_text(sample: list[list[Message]]) -> None:
    for dialogue in sample[:5000]:
        for message in dialogue:
            if not message["content"].startswith(("Tools: ", CALL_START, "{")):
                assert not re.search(r"[{}()|]", message["content"].replace(" | ", " ")), message["content"]
            assert message["content"].strip()


def test_answers_state_the_facts_of_the_catalogue() -> None:
    rng = random.Random(1)
    for series in load_catalogue():
        assert series.author in series_answer(series, "author", rng)
        assert series.price in series_answer(series, "price", rng)
        assert str(series.volumes) in series_answer(series, "volumes", rng)
        assert series.publisher in series_answer(series, "publisher", rng)


def test_every_series_has_others_to_recommend() -> None:
    for series in load_catalogue():
        assert len(similar_to(series)) >= 2
        assert series not in similar_to(series)
        assert series in by_author(series.author)


def test_a_long_dialogue_is_longer_than_an_ordinary_one() -> None:
    def length(share: float) -> int:
        rng = random.Random(4)
        return sum(len(m["content"]) for _ in range(100) for m in make_dialogue(rng, Mix(long=share)))

    assert length(1.0) > 3 * length(0.0)


def test_alternatives_resolve_to_one_option_each() -> None:
    seen = {spin("(a|b) (c|) d.", random.Random(seed)) for seed in range(50)}
    assert seen == {"a c d.", "a d.", "b c d.", "b d."}


def test_slots_are_filled_after_the_choice() -> None:
    assert say(("{t} (is fine|is fine).",), random.Random(0), {"t": "X (1)"}) == "X (1) is fine."
