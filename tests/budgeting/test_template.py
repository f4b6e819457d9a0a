from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.controls import ControlTokens
from budgeting.errors import TemplateRefused
from budgeting.template import ChatTemplate
from budgeting.values import Message, Role
from tests.budgeting import folders, strategies

TALK = [Message(Role.USER, "<b> é"), Message(Role.ASSISTANT, "fine")]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 11, 20))


def rendered(source: str) -> str:
    return template(source).render(TALK, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0]['content'] | tojson }}", '"<b> é"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[2],"b":1}'),
        ("{{ strftime_now('%d %b %Y') }}", "20 Nov 2026"),
        (
            "{% for m in messages %}\n {% if loop.first %}\n{{ bos_token }}\n {% endif %}\n{% endfor %}",
            "<s>\n",
        ),
        (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
            "user",
        ),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "fine"),
        ("{% if tools is none and documents is none %}no{% endif %}", "no"),
        (
            "{% set n = namespace(n=0) %}{% for m in messages %}{% set n.n = n.n + 1 %}{% endfor %}{{ n.n }}",
            "2",
        ),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only one turn is allowed') }}",
        "{{ messages[7].content.strip() }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_whatever_goes_wrong_inside_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefused):
        rendered(source)


def test_a_refusal_says_what_the_template_said() -> None:
    with pytest.raises(TemplateRefused, match="only one turn is allowed"):
        rendered("{{ raise_exception('only one turn is allowed') }}")


@pytest.mark.parametrize(
    "source",
    [
        folders.CHATML,
        folders.HEADERS,
        folders.UNMARKED,
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}!{% endif %}{{ m.content | trim }}"
        "{% endfor %}",
        "{% for m in messages %}{% set c = m.content.strip() %}{% if m.role == 'user' %}{{ c }}{% endif %}"
        "{% endfor %}",
        "{% for m in messages %}{% if tools %}{{ raise_exception('x') }}{% endif %}{{ m.content }}"
        "{% endfor %}",
    ],
)
def test_a_loop_over_messages_that_looks_at_nothing_else_renders_each_alone(source: str) -> None:
    assert template(source).each_message_alone


@pytest.mark.parametrize(
    "source",
    [
        folders.COUNTING,
        folders.ALTERNATING,
        "no messages at all",
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
        "{% for m in messages %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem }}{% endfor %}",
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ messages[0].content }}{% endfor %}",
        "{% for m in messages %}{% if add_generation_prompt %}!{% endif %}{% endfor %}",
        "{% for m in messages %}{{ strftime_now('%S') }}{% endfor %}",
        "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
        "{% for m in messages %}{% if m.content %}{% break %}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}",
        "{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{% macro show(m) %}{{ messages }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{% set tools = messages %}{% for m in tools %}{{ tools }}{% endfor %}",
        "{% for messages in messages %}{{ messages }}{% endfor %}",
        "{% for role, content in messages %}{{ role }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% else %}none{% endfor %}",
    ],
)
def test_a_template_that_looks_beyond_one_message_is_rendered_whole(source: str) -> None:
    assert not template(source).each_message_alone


CONTROLS = ControlTokens({"<|a|>": 1, "<|a|><|b|>": 2, "ab": 3, "bc": 4, "ca": 5, "x": 6})


@given(text=st.text(st.sampled_from("abcx<|>\ufdd0\ufdd1\ufdd2"), max_size=30) | strategies.hostile_texts)
def test_a_guarded_text_holds_no_control_token_and_comes_back_unchanged(text: str) -> None:
    guarded = CONTROLS.guard(text)
    assert all(token_id is None for _, token_id in CONTROLS.segments(guarded))
    assert CONTROLS.unguard(guarded) == text
    assert "".join(CONTROLS.split_at_breaks(guarded)) == text


def test_the_templates_own_control_tokens_are_found_longest_first() -> None:
    assert [token_id for _, token_id in CONTROLS.segments("<|a|><|b|>-<|a|>")] == [2, None, 1]
