"""The held-out evaluation: its question file and how it scores."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evaluation.demo_eval import DemoAnswer, DemoQuestion, load_questions, main, summary

DEMO = Path(__file__).parents[2] / "models" / "demo"


def question(expect: str, language: str = "en") -> DemoQuestion:
    return DemoQuestion("q", "t", language, expect, [{"role": "user", "content": "?"}])


def test_there_are_a_hundred_questions_with_distinct_ids_and_wordings() -> None:
    questions = load_questions()
    assert len(questions) == 100
    assert len({item.id for item in questions}) == 100
    assert len({item.messages[-1]["content"] for item in questions}) >= 99


def test_the_questions_spread_over_languages_turns_and_evidence() -> None:
    questions = load_questions()
    assert sum(item.language == "ja" for item in questions) >= 15
    assert sum(len([m for m in item.messages if m["role"] != "system"]) > 1 for item in questions) >= 14
    assert sum("[" in "".join(m["content"] for m in item.messages) for item in questions) >= 15
    assert sum(item.messages[0]["role"] == "user" for item in questions) >= 25


def test_every_pattern_compiles_and_every_conversation_ends_with_the_user() -> None:
    for item in load_questions():
        re.compile(item.expect)
        assert item.messages[-1]["role"] == "user"


def test_no_pattern_accepts_an_evasive_or_unrelated_answer() -> None:
    for item in load_questions():
        for answer in ("", "I do not know.", "わかりません。", "Please see our website."):
            assert not item.accepts(answer), item.id


def test_a_matching_answer_is_accepted_whatever_its_case() -> None:
    assert question("miura").accepts("Berserk is by Kentaro Miura.")
    assert not question("miura").accepts("Berserk is by someone else.")


def test_a_japanese_question_needs_japanese_characters() -> None:
    assert question("72", "ja").accepts("全72巻です。")
    assert not question("72", "ja").accepts("72 volumes.")


def test_the_summary_counts_by_topic() -> None:
    outcomes = [
        DemoAnswer("a", "x", "?", "one", passed=True, ended=True),
        DemoAnswer("b", "x", "?", "two", passed=False, ended=True),
        DemoAnswer("c", "y", "?", "one", passed=True, ended=False),
    ]
    assert summary(outcomes) == {
        "topics": {"x": {"passed": 1, "asked": 2}, "y": {"passed": 1, "asked": 1}},
        "passed": 2,
        "asked": 3,
        "ended": 2,
        "distinct_answers": 2,
    }


@pytest.mark.parametrize("option", ["--json", "--failures"])
def test_the_command_prints_counts(option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = tmp_path / "questions.jsonl"
    lines = (
        (Path(__file__).parents[2] / "evaluation" / "demo_questions.jsonl").read_text("utf-8").splitlines()
    )
    few.write_text("\n".join(lines[:3]), encoding="utf-8")
    main(["--model", str(DEMO), "--questions", str(few), option])
    out = capsys.readouterr().out
    if option == "--json":
        assert json.loads(out)["asked"] == 3
    else:
        assert "distinct answers" in out
