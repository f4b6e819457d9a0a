from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts.canonical import normalize
from gateway.prompts.volatile import (
    MAX_LINE_CHARS,
    MAX_SENTENCE_CHARS,
    Separated,
    VolatileFinder,
    VolatileKind,
)


def separate(text: str) -> Separated:
    return VolatileFinder().separate(normalize(text))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Today is 2026-11-20.", "date"),
        ("The current date is Friday, 20 November 2026.", "date"),
        ("It is November 20th, 2026.", "date"),
        ("Today is 20.11.2026", "date"),
        ("The date today is 11/20/2026.", "date"),
        ("- Date: November 20", "date"),
        ("Today is Friday.", "date"),
        ("今日は2026年11月20日です。", "date"),
        ("오늘은 2026년 11월 20일입니다.", "date"),
        ("Current time: 2026-11-20T10:32:05Z", "time"),
        ("generated 2026-11-20 10:32:05.123+01:00", "time"),
        ("Date: Fri, 20 Nov 2026 10:00:00 +0000", "time"),
        ("Now: Fri Nov 20 10:00:00 2026", "time"),
        ("Log 10:32:05 start", "time"),
        ("The time is 3 pm.", "time"),
        ("The current time in Tokyo is 10:32.", "time"),
        ("Time (UTC): 10:32", "time"),
        ("現在時刻は10時32分です。", "time"),
        ("Timestamp: 1763635200", "timestamp"),
        ("created_at: 1763635200.25", "timestamp"),
        ("ts=1763635200123", "timestamp"),
        ("Session 123e4567-e89b-12d3-a456-426614174000 began.", "uuid"),
        ("trace 01ARZ3NDEKTSV4RRFFQ69G5FAV", "ulid"),
        ("request_id: req_9f1b", "id"),
        ("Request ID 8841-aa", "id"),
        ("The session id is 'a8f3'.", "id"),
        ("session sess_77ad is open", "id"),
        ("The user's record: user_id=1234", "id"),
        ('{"conversation_id": "a8f3"}', "id"),
        ("made by chatcmpl-9abc12de", "id"),
        ("traceparent 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "hex"),
        ("This is turn 7 of the conversation", "counter"),
        ("Turn 7 of 20", "counter"),
        ("Message #12", "counter"),
        ("You are on message 12.", "counter"),
        ("message_count: 12", "counter"),
    ],
)
def test_volatile_content_is_found_and_its_sentence_taken_out(text: str, kind: str) -> None:
    found = separate(f"You sell manga.\n{text}\nBe brief.")
    assert VolatileKind(kind) in {finding.kind for finding in found.findings}
    assert found.stable == "You sell manga.\nBe brief."
    assert "\n".join(found.moved) == text


@pytest.mark.parametrize(
    "text",
    [
        "The manga was published in 1994.",
        "Since 2005-08-11 the shop sells Vinland Saga.",
        "Berserk began on 25 August 1989.",
        "Between 2024-01-01 and 2024-03-01 returns were free.",
        "発売日は2024年5月1日です。",
        "Write dates in the format 2024-05-01.",
        "For example: 2024-05-01.",
        "Copyright 2019-2026 Manga Shop.",
        "Knowledge cutoff: December 2023",
        "It costs $19.99 or 1,299 yen.",
        "ISBN 978-1-61262-420-4, or 9781612624204, or ISBN-10 1421536242.",
        "Use API version 2.1.3 and Python 3.11.2.",
        "Vinland Saga vol. 12 has 432 pages; volumes 1-27, chapter 100/220.",
        "Open from 9:00 to 18:00. We are now open from 9:00. Opening time: 9:00",
        "We ship within 24 hours, 7 days a week. On Friday we ship at noon. Closed on 25 December.",
        "Call 1800123456 or +49 30 1234567.",
        "Answer in 3 sentences. Step 3: check the stock. After the 2nd request, escalate.",
        "Use a 16:9 picture. See John 3:16.",
        "Colour #ff00aa, weight 1.25 kg, model AB-1234.",
        "1984 by George Orwell; 20th Century Boys; 1Q84; 2001: A Space Odyssey.",
        "Chat keywords1 and user identity2 are names; the message key must have 8 digits.",
        "A request-id has no number here; session-scoped rules hold.",
        "Turn 90 degrees. In May it rains. This Friday we rest. It is 5 euros.",
        "```\nToday is 2026-11-20, request req_9f1b.\n```",
    ],
)
def test_text_that_only_looks_volatile_stays(text: str) -> None:
    assert separate(text) == Separated(text)


def test_only_the_volatile_sentence_is_removed_and_abbreviations_end_no_sentence() -> None:
    found = separate("You serve readers. You serve Mr. Smith now, session sess_77ad. Be brief. Be kind.")
    assert found.stable == "You serve readers.\nBe brief. Be kind."
    assert found.moved == ("You serve Mr. Smith now, session sess_77ad.",)


def test_a_sentence_that_runs_on_over_a_line_end_goes_whole() -> None:
    found = separate("Be brief. The day is\n2026-11-20 and we\nare open. Be kind.\nlocale: ja")
    assert found.stable == "Be brief.\nBe kind.\nlocale: ja"
    assert found.moved == ("The day is", "2026-11-20 and we", "are open.")


def test_items_of_a_list_and_fields_go_alone() -> None:
    found = separate(
        "Rules:\n- be brief\n- time: 10:32:05\n- be kind\nlocale: ja\nsession: sess_77ad\nshop: jp"
    )
    assert found.stable == "Rules:\n- be brief\n- be kind\nlocale: ja\nshop: jp"


def test_a_paragraph_that_goes_leaves_one_blank_line() -> None:
    assert separate("A.\n\nTime: 10:32:05\n\nB.").stable == "A.\n\nB."


def test_a_finding_names_its_message_and_its_sentence() -> None:
    [found] = VolatileFinder().separate("Hi. Today is 2026-11-20. Bye.", 3).findings
    assert (found.kind, found.text, found.sentence, found.message) == (
        VolatileKind.DATE,
        "2026-11-20",
        "Today is 2026-11-20.",
        3,
    )


WORDS = [
    "Today is 2026-11-20", "Be brief", "it is", "now", "Time:", "10:32", "10:32:05", "sess_77ad", "Mr.", "vol. 2",
    "turn 7 of 9", "1763635200", "2026年11月20日", "```", "~~~", "-", "# ", "Date", "Friday", "since", "e.g.", "a", "B",
    "今日", "(", '"', "\u3000", "\u0301", "\u2003", "/",
]  # fmt: skip
ENDS = [". ", "! ", "\n", "\n\n", "。", " ", ", ", ".", "\n  ", "?\t"]
texts = st.lists(st.sampled_from(WORDS) | st.sampled_from(ENDS) | st.text(max_size=3), max_size=24).map(
    "".join
)


def squeezed(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=60)
@given(text=texts)
def test_separating_twice_is_separating_once(text: str) -> None:
    once = separate(text)
    assert normalize(once.stable) == once.stable
    again = separate(once.stable)
    assert again.stable == once.stable and not again.findings and not again.moved


@settings(max_examples=60)
@given(text=texts)
def test_nothing_is_lost_and_what_goes_is_verbatim(text: str) -> None:
    whole, found = normalize(text), separate(text)
    assert sorted(squeezed(found.stable + "".join(found.moved))) == sorted(squeezed(whole))
    assert all(piece in whole for piece in found.moved)
    assert all(line.strip() in whole for line in found.stable.split("\n"))


@given(texts=st.lists(texts, max_size=6))
def test_the_cache_of_lines_changes_no_result(texts: list[str]) -> None:
    finder = VolatileFinder(max_lines=2)
    for text in [*texts, *texts]:
        assert finder.separate(normalize(text)) == separate(text)


def test_a_run_of_text_without_an_end_is_data_and_stays() -> None:
    text = "x " * MAX_SENTENCE_CHARS + "2026-11-20"
    assert separate(text) == Separated(text)


def test_a_line_longer_than_any_prose_is_data_and_stays_beside_lines_that_are_searched() -> None:
    data = "Today is 2026-11-20. " * (MAX_LINE_CHARS // 21 + 1) + "So it is over."
    assert separate(f"{data}\nToday is 2026-11-20.\nBe kind.").stable == f"{data}\nBe kind."


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    ["a", "1 ", "11:", "0f", "-", "2026-", "20 nov ", "\n", "Today is ", "turn 1 ", "May 1 ", "user_id=", "x\n1",
     "A. ", "B. 1 ", "1。", ".", "!?", "。", ".\t", "`。", "session key", "Mon, ", "12345678-", "req_", "(\"", " ", "\u3000。"],
)  # fmt: skip
def test_the_search_time_grows_linearly_with_the_length_of_any_text(unit: str) -> None:
    """Linear: eight times the text takes about eight times as long."""
    finder = VolatileFinder()

    def took_s(chars: int) -> float:
        text = unit * (chars // len(unit))
        began = time.thread_time()
        finder.separate(text)
        return time.thread_time() - began

    small = max(min(took_s(MAX_LINE_CHARS // 8) for _ in range(2)), 0.002)
    assert took_s(MAX_LINE_CHARS) < 40 * small
