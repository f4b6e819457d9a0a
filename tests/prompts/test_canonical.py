from __future__ import annotations

import unicodedata
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.sections import prompt_messages
from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role
from gateway.errors import InvalidRequest
from gateway.prompts.canonical import canonicalize, normalize, render_context, stable_text
from gateway.prompts.versions import PromptVersion

VERSION = PromptVersion(id="v", system="You sell manga.", policy="Be short.\n", grounding_rule="Cite.")
USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM

texts = st.text(st.characters(codec="utf-8"), max_size=20) | st.text(
    " \t\r\n\u3000e\u0301A\u030aガ", max_size=20
)
messages = st.lists(st.builds(Message, st.sampled_from(list(Role)), texts), max_size=8)


def test_the_versions_text_comes_first_as_one_message_and_the_callers_follow() -> None:
    prompt = canonicalize(
        [Message(USER, "hi"), Message(SYSTEM, "Speak Japanese."), Message(USER, "bye")], version=VERSION
    )
    assert prompt.system == ("You sell manga.\n\nBe short.\n\nCite.", "Speak Japanese.")
    assert prompt.turns == (Message(USER, "hi"), Message(USER, "bye"))


def test_parts_that_a_version_does_not_have_leave_no_gap() -> None:
    assert stable_text(PromptVersion(id="v", system="A", grounding_rule="C")) == "A\n\nC"


def test_without_a_version_nothing_is_added() -> None:
    assert canonicalize([Message(USER, "hi")]) == CanonicalPrompt(turns=(Message(USER, "hi"),))


def test_empty_system_messages_are_dropped() -> None:
    assert canonicalize([Message(SYSTEM, " \n\t"), Message(USER, "hi")]).system == ()


def test_a_raw_prompt_stands_alone() -> None:
    assert canonicalize([], raw_prompt=(1, 2), version=VERSION) == CanonicalPrompt(raw=(1, 2))
    assert canonicalize([], raw_prompt=" e\u0301 \r\n") == CanonicalPrompt(raw=" e\u0301 \r\n")


def test_evidence_keeps_the_callers_order_and_words() -> None:
    chunks = [EvidenceChunk("b", "review", "x \r\n", 0.1), EvidenceChunk("a", "catalog", "y", 0.9)]
    assert canonicalize([], chunks=chunks).evidence == tuple(chunks)


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("A\r\nB\rC\n", "A\nB\nC"),
        ("  A  \n\n B\t\n\n", "A\n\n B"),
        ("e\u0301", "é"),
        ("", ""),
    ],
)
def test_accidents_of_writing_are_removed_from_system_texts(written: str, normal: str) -> None:
    assert normalize(written) == normal


@given(text=texts)
def test_normalizing_twice_is_normalizing_once(text: str) -> None:
    once = normalize(text)
    assert normalize(once) == once
    assert unicodedata.is_normalized("NFC", once)


@given(text=texts)
def test_texts_of_equal_meaning_have_equal_prefixes(text: str) -> None:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    variants = (text, unicodedata.normalize("NFD", text), f"\n{text}\n\n", " \t\r\n".join(lines))
    assert len({canonicalize([Message(SYSTEM, variant)]).system for variant in variants}) == 1


@given(messages=messages)
def test_user_and_assistant_turns_stay_verbatim_and_in_order(messages: list[Message]) -> None:
    prompt = canonicalize(messages, version=VERSION)
    assert list(prompt.turns) == [message for message in messages if message.role is not SYSTEM]


@given(messages=messages)
def test_canonicalizing_the_rendered_messages_changes_nothing(messages: list[Message]) -> None:
    once = canonicalize(messages)
    assert canonicalize(prompt_messages(once)) == once


@given(messages=messages, before=st.dictionaries(texts, texts), after=st.dictionaries(texts, texts))
def test_the_context_touches_neither_system_texts_nor_turns(
    messages: list[Message], before: dict[str, str], after: dict[str, str]
) -> None:
    one, two = (canonicalize(messages, context=context, version=VERSION) for context in (before, after))
    assert (one.system, one.turns) == (two.system, two.turns)


def test_context_is_one_line_a_field_sorted_by_key() -> None:
    context = {
        "time": "2026-11-20T10:00:00Z",
        "locale": "ja",
        "cart": {"b": 1, "a": ["ガ"]},
        "vip": True,
        "n": None,
    }
    assert render_context(context) == (
        'cart: {"a":["ガ"],"b":1}\nlocale: ja\nn: null\ntime: 2026-11-20T10:00:00Z\nvip: true'
    )
    assert render_context(MappingProxyType({"a": MappingProxyType({"b": 1})})) == 'a: {"b":1}'
    assert render_context({}) == ""


@given(context=st.dictionaries(st.text(max_size=8), st.text(max_size=12), max_size=5))
def test_no_value_can_look_like_another_field(context: dict[str, str]) -> None:
    assert len(render_context(context).splitlines()) == len(context)


def test_a_context_that_is_not_json_names_its_field() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, object(), float("nan")):
        with pytest.raises(InvalidRequest) as caught:
            render_context({"a": value})
        assert caught.value.param == "context"
