"""The checks of an answer."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from gateway.config.errors import ConfigError
from gateway.contracts.values import FormatType, ResponseFormat
from gateway.shadow.checks import (
    Check,
    Exam,
    forbidding,
    grounding,
    language,
    make_checks,
    no_personal_data,
    no_refusal,
    shape,
)
from gateway.shadow.language import language_of
from gateway.shadow.likeness import chrf
from gateway.shadow.personal import redact_personal

EVIDENCE = (
    "Vinland Saga by Makoto Yukimura, volume 1, 1,299 yen, 27 volumes.",
    "『葬送のフリーレン』 山田鐘人",
)
SCHEMA = '{"type": "object", "required": ["title"], "properties": {"title": {"type": "string", "pattern": "^(a+)+$"}}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Vinland Saga is by Makoto Yukimura.", True),
        ("Try Yukimura's Vinland Saga: 27 volumes, 1299 yen each.", True),
        ("You may like Berserk by Kentaro Miura.", False),
        ("It is 1,499 yen.", False),
        ("『葬送のフリーレン』はいかがですか。", True),
        ("『ベルセルク』はいかがですか。", False),
        ("Certainly, have a look.", None),
    ],
)
def test_names_and_numbers_must_occur_in_the_evidence(text: str, said: bool | None) -> None:
    assert grounding(Exam(text, "What is good?", "What is good?", EVIDENCE)) is said


def test_what_the_caller_named_is_grounded_and_without_evidence_nothing_is_said() -> None:
    assert grounding(Exam("Berserk is not in our catalog.", said="Do you have Berserk?", evidence=EVIDENCE))
    assert grounding(Exam("Berserk is by Kentaro Miura.")) is None


@pytest.mark.parametrize(
    ("kind", "spec", "text", "said"),
    [
        (FormatType.TEXT, "", "fine", True),
        (FormatType.TEXT, "", "  ", False),
        (FormatType.JSON_OBJECT, "", '{"a": 1}', True),
        (FormatType.JSON_OBJECT, "", "[1]", False),
        (FormatType.JSON_OBJECT, "", '{"a": ', False),
        (FormatType.JSON_SCHEMA, SCHEMA, '{"title": "x"}', True),
        (FormatType.JSON_SCHEMA, SCHEMA, '{"name": "x"}', False),
        (FormatType.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:9/none"}', "{}", True),
        (
            FormatType.JSON_SCHEMA,
            '{"name": "x", "schema": {"type": "integer"}, "type": "object"}',
            "{}",
            True,
        ),
        (FormatType.CHOICE, '["yes", "no"]', " yes", True),
        (FormatType.CHOICE, '["yes", "no"]', "maybe", False),
        (FormatType.REGEX, "(a+)+$", "a" * 40 + "b", None),
    ],
)
def test_an_answer_has_the_shape_that_was_asked_for(
    kind: FormatType, spec: str, text: str, said: bool | None
) -> None:
    assert shape(Exam(text, wanted=ResponseFormat(kind, spec))) is said


def test_a_callers_pattern_is_never_run() -> None:
    # Backtracking over this text would take longer than the test's timeout.
    assert shape(
        Exam('{"title": "' + "a" * 60 + '!"}', wanted=ResponseFormat(FormatType.JSON_SCHEMA, SCHEMA))
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("You will like it, and the art is great.", "en"),
        ("Das ist ein Band, den ich nicht kenne.", "de"),
        ("C'est une histoire pour les adultes, et je ne la connais pas.", "fr"),
        ("El manga es de una autora que no está en la tienda.", "es"),
        ("進撃の巨人がおすすめです。", "ja"),
        ("『進撃の巨人』 is what you want, and it is the best of all.", "en"),
        ("这本书很好", "zh"),
        ("Berserk", None),
        ("42", None),
    ],
)
def test_scripts_and_function_words_decide_a_language(text: str, code: str | None) -> None:
    assert language_of(text) == code


def test_an_answer_is_in_the_language_of_the_question_or_else_of_the_locale() -> None:
    english = "You will like it, and the art is great."
    assert language(Exam(english, question="What is the best of them?")) is True
    assert language(Exam(english, question="おすすめは何ですか")) is False
    assert language(Exam(english, question="Berserk?", locale="ja-JP")) is False
    assert language(Exam("Berserk", question="What is the best of them?")) is None


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("mail jo.doe@mail.example now", "mail [mail] now"),
        ("call +49 170 1234567", "call [phone]"),
        ("call 555-123-4567", "call [phone]"),
        ("電話は03-1234-5678です", "電話は[phone]です"),
        ("card 4111 1111 1111 1111", "card [card]"),
        ("IBAN DE89 3704 0044 0532 0130 00.", "IBAN [iban]."),
        ("from 192.168.0.17", "from [ip]"),
        ("ssn 123-45-6789", "ssn [ssn]"),
    ],
)
def test_personal_data_is_known_by_its_shape(text: str, redacted: str) -> None:
    assert redact_personal(text) == redacted
    assert no_personal_data(Exam(text)) is False


@pytest.mark.parametrize(
    "text",
    [
        "volumes 1 to 27 cost 1,299.00 yen each",
        "order 1234567890123456",  # without a card's check digit
        "published 1999-2004, reprinted 2024-10-11",
        "version 1.2.3.4567",
        "ISBN 978-4-06-510095-6",
    ],
)
def test_prices_dates_and_order_numbers_are_not_personal(text: str) -> None:
    assert redact_personal(text) == text


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("I'm sorry, but I can't help with that.", False),
        ("申し訳ございませんが、お答えできません。", False),
        ("As an AI, I have no opinion.", False),
        ("Of course! Guts can't help it, he fights on.", True),
        ("Berserk is by Kentaro Miura.", True),
    ],
)
def test_an_answer_that_declines_is_known(text: str, answers: bool) -> None:
    assert no_refusal(Exam(text)) is answers


def test_the_operators_patterns_are_forbidden_blind_to_case() -> None:
    check: Check = forbidding(["other\\s*shop"])
    assert check(Exam("Buy it at OtherShop.")) is False and check(Exam("Buy it here.")) is True
    assert forbidding([])(Exam("anything")) is None


def test_checks_are_named_built_in_or_by_module() -> None:
    checks = make_checks(["shape", "gateway.shadow.checks:no_refusal"], [])
    assert list(checks.errors) == ["shape", "gateway.shadow.checks:no_refusal"]
    for wrong in ("shapes", "gateway.shadow.checks:nothing", "no.such.module:at_all", "os:sep"):
        with pytest.raises(ConfigError, match=wrong.split(":")[0].replace(".", r"\.")):
            make_checks([wrong])


def raising(exam: Exam) -> bool:
    raise ValueError(f"cannot read {exam.text}")


def test_a_check_that_raises_is_counted_and_logged_once_without_the_answers_text() -> None:
    checks = make_checks(["shape", f"{__name__}:raising"])
    with capture_logs() as logs:
        results = [checks.run(Exam("a secret answer")) for _ in range(3)]
    assert results == [{"shape": True, f"{__name__}:raising": None}] * 3
    assert checks.errors == {"shape": 0, f"{__name__}:raising": 3}
    [line] = logs
    assert (line["check"], line["error_type"]) == (f"{__name__}:raising", "ValueError")
    assert "secret" not in str(line)


def test_likeness_is_one_for_equal_texts_and_falls_with_their_differences() -> None:
    text = "Vinland Saga is by Makoto Yukimura."
    assert chrf(text, text) == pytest.approx(1.0)
    assert chrf(text, "  Vinland Saga is by Makoto  Yukimura. ") == pytest.approx(1.0)
    near, far = chrf(text, "Vinland Saga is from Makoto Yukimura."), chrf(text, "進撃の巨人です。")
    assert 1.0 > near > 0.6 > far == 0.0
    assert chrf("", "") == 1.0 and chrf("", "a") == 0.0
    assert chrf("a", "a") == pytest.approx(1.0)
