from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.sentences import sentence_ends, sentences


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One here. Two there! Three?", ["One here.", "Two there!", "Three?"]),
        ("在庫はあります。明日発送できます！本当？はい", ["在庫はあります。", "明日発送できます！", "本当？", "はい"]),
        ("यह पहला है। यह दूसरा है॥ तीसरा", ["यह पहला है।", "यह दूसरा है॥", "तीसरा"]),
        ("هل هذا متوفر؟ نعم. شكرا", ["هل هذا متوفر؟", "نعم.", "شكرا"]),
        ("یہ پہلا ہے۔ یہ دوسرا ہے۔", ["یہ پہلا ہے۔", "یہ دوسرا ہے۔"]),
        ("ይህ አንድ ነው። ሁለት", ["ይህ አንድ ነው።", "ሁለት"]),
        ("Это первое. «Это второе.» И третье", ["Это первое.", "«Это второе.»", "И третье"]),
        ("「はい。」そうです。", ["「はい。」", "そうです。"]),
        ('He said "yes." Then left.', ['He said "yes."', "Then left."]),
        ("A line\nanother line\n\nlast", ["A line", "another line", "last"]),
        ("It costs 3.50 EUR, see vol. 12 and e.g. this one. Good.", ["It costs 3.50 EUR, see vol. 12 and e.g. this one.", "Good."]),
        ("no mark at all", ["no mark at all"]),
        ("", []),
        (" \n ", []),
    ],
)  # fmt: skip
def test_sentences_end_at_the_marks_of_their_script(text: str, found: list[str]) -> None:
    assert sentences(text) == found


@given(st.text() | st.lists(st.sampled_from(["a", ". ", "。", "! ", "\n", " ", '"', "b", "."])).map("".join))
def test_sentences_joined_are_the_text(text: str) -> None:
    ends = sentence_ends(text)
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(text)
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("unit", [".", "a.", ". ", "。", "\n", '."', " ", "a"])
def test_the_time_grows_with_the_length_alone(unit: str) -> None:
    sentence_ends(unit * 10)
    began = time.process_time()
    sentence_ends(unit * 500_000)
    sentence_ends(unit * 500_000 + "x")
    assert time.process_time() - began < 5.0
