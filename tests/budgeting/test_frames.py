from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.counting import ChatTokenizer
from budgeting.template import ChatTemplate
from budgeting.template_analysis import MARKER, Frame, frame_in
from budgeting.values import Message, Role
from tests.budgeting import folders, strategies


def only_frames(source: str) -> bool:
    return ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 11, 20)).frames_only


@pytest.mark.parametrize(
    "source",
    [
        folders.CHATML,
        folders.HEADERS,
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% else %}A{{ m.content }}{% endif %}"
        "{% endfor %}",
        "{% for m in messages %}{% set t = '[' ~ m.content ~ ']' %}{{ t }}{% endfor %}",
        "{% for m in messages %}fixed{% endfor %}",
    ],
)
def test_markup_around_a_text_is_a_frame(source: str) -> None:
    assert only_frames(source)


@pytest.mark.parametrize(
    "source",
    [
        folders.COUNTING,
        folders.ALTERNATING,
        "{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}"
        "{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
        "{% for m in messages %}{{ m.content or 'nothing' }}{% endfor %}",
        "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
        "{% for m in messages %}{{ m['content'][:10] }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
        "{% for m in messages %}{% set t = m.content %}{% if t %}{{ t }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% set t = 'a' + m.content %}{{ t | trim }}{% endfor %}",
        "{% for m in messages %}{% set t = m %}{{ t.content | title }}{% endfor %}",
    ],
)
def test_a_template_that_does_more_with_a_text_than_trim_it_has_no_frames(source: str) -> None:
    assert not only_frames(source)


def test_the_frame_is_what_stands_around_the_marker() -> None:
    assert frame_in(f"<a>{MARKER}</a>") == Frame("<a>", "</a>", trims=False)
    assert frame_in(f"<a>{MARKER.strip()}</a>") == Frame("<a>", "</a>", trims=True)
    assert frame_in("fixed") is None
    assert frame_in(MARKER * 2) is None
    assert frame_in(f"x{MARKER.lstrip()}") is None  # trimmed on one side only


@strategies.examples(150)
@given(conversation=st.lists(strategies.hostile_messages, min_size=1, max_size=5))
def test_framed_messages_have_the_ids_of_the_rendered_ones(
    framed: ChatTokenizer, conversation: list[Message]
) -> None:
    cuts = tuple(range(len(conversation) + 1))
    assert framed.encode_parts(conversation, cuts) == framed.encode_parts_whole(conversation, cuts)


@pytest.fixture(scope="module", params=["demo", "chatml", "headers"])
def framed(request: pytest.FixtureRequest, tokenizers: dict[str, ChatTokenizer]) -> ChatTokenizer:
    tokenizer = tokenizers[request.param]
    assert {role for _, role in tokenizer._frames} == set(Role)
    return tokenizer


def test_a_text_is_encoded_without_its_frame_unless_both_could_form_a_control_token(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    vocabulary = tokenizers["demo"]._vocabulary
    start, end = (vocabulary.controls.ids[token] for token in ("<|im_start|>", "<|im_end|>"))
    line = vocabulary.plain_ids("\n")
    assert vocabulary.markup("<|im_start|>user\n", "<|im_end|>\n") == ([start], 12, [end, *line], 11)
    assert vocabulary.markup("", "") == ([], 0, [], 0)
    assert vocabulary.markup("<|im_start|>user <|im_", "<|im_end|>") is None
    assert vocabulary.markup("<|im_start|>user\n", "end|><|im_end|>") is None
