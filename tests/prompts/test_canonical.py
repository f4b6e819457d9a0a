from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from budgeting.sections import prompt_messages
from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role
from gateway.config.volatile import VolatilePolicy
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import InvalidRequest
from gateway.prompts.canonical import (
    INLINE_SYSTEM_CHARS,
    Canonical,
    Canonicalizer,
    normalize,
    render_context,
    stable_text,
)
from gateway.prompts.versions import PromptVersion

VERSION = PromptVersion(id="v", system="You sell manga.", policy="Be short.\n", grounding_rule="Cite.")
USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM

T = TypeVar("T")
MOVE, REPORT, OFF = VolatilePolicy.MOVE, VolatilePolicy.REPORT, VolatilePolicy.OFF


def canonical(
    messages: Sequence[Message],
    *,
    version: PromptVersion | None = None,
    volatile: VolatilePolicy = OFF,
    **fields: Any,
) -> Canonical:
    asked = replace(request(Contract.NATIVE, messages), **fields)
    return Canonicalizer(native=volatile).canonical(asked, version)


def canonicalize(messages: Sequence[Message], **options: Any) -> CanonicalPrompt:
    return canonical(messages, **options).prompt


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
    assert canonicalize([], chunks=tuple(chunks)).evidence == tuple(chunks)


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


STAMPED = Message(SYSTEM, "You sell manga. Today is 2026-11-20. Be brief.\nSession: sess_77ad\nBe kind.")


def test_volatile_content_of_system_messages_follows_the_fields_of_the_context() -> None:
    found = canonical([STAMPED, Message(USER, "hi")], context={"locale": "ja"}, volatile=MOVE)
    assert found.prompt.system == ("You sell manga.\nBe brief.\nBe kind.",)
    assert found.prompt.context == "locale: ja\nToday is 2026-11-20.\nSession: sess_77ad"
    assert (found.kinds, found.moved) == (("date", "id"), True)


def test_reporting_changes_nothing_and_off_does_not_look() -> None:
    plain = canonicalize([STAMPED])
    reported, off = (canonical([STAMPED], volatile=policy) for policy in (REPORT, OFF))
    assert reported.prompt == off.prompt == plain
    assert (reported.kinds, reported.moved, off.findings) == (("date", "id"), False, ())


def test_a_prompt_versions_own_text_is_not_searched() -> None:
    version = PromptVersion(id="v", system="In force: 2026-11-20.")
    assert canonical([], version=version, volatile=MOVE).prompt.system == ("In force: 2026-11-20.",)


def test_a_system_message_of_only_volatile_content_is_removed() -> None:
    found = canonical([Message(SYSTEM, "Today is 2026-11-20."), Message(USER, "hi")], volatile=MOVE)
    assert (found.prompt.system, found.prompt.context) == ((), "Today is 2026-11-20.")


@given(day=st.dates(), more=st.dates())
def test_requests_that_differ_in_their_time_alone_have_one_prefix(day: object, more: object) -> None:
    one, two = (
        canonicalize([Message(SYSTEM, f"You sell manga.\nToday is {at}.\nBe brief.")], volatile=MOVE)
        for at in (day, more)
    )
    # Only dates in the years 1900 to 2099 are found.
    if all("1900" <= str(at) < "2100" for at in (day, more)):
        assert one.system == two.system == ("You sell manga.\nBe brief.",)


def request(contract: Contract, messages: Sequence[Message] = (STAMPED,)) -> GenerateRequest:
    caller = Caller("acme", CallerRole.CALLER, "key_1")
    return GenerateRequest("req_1", "gen_1", caller, 0.0, 0, contract=contract, messages=tuple(messages))


def test_the_native_contract_moves_and_openais_only_reports_unless_told_otherwise() -> None:
    default = Canonicalizer()
    assert default.canonical(request(Contract.NATIVE), None).moved
    assert not default.canonical(request(Contract.CHAT), None).moved
    canonicalizer = Canonicalizer(native=OFF, openai=MOVE)
    assert not canonicalizer.canonical(request(Contract.NATIVE), None).findings
    assert canonicalizer.canonical(request(Contract.CHAT), None).moved


def test_a_prompt_versions_policy_wins() -> None:
    version = PromptVersion(id="v", system="Hi.", volatile=OFF)
    assert not Canonicalizer().canonical(request(Contract.NATIVE), version).findings


def test_messages_alone_are_made_canonical_as_openais_contract_does() -> None:
    for openai in VolatilePolicy:
        canonicalizer = Canonicalizer(openai=openai)
        whole = canonicalizer.canonical(request(Contract.CHAT), None)
        assert canonicalizer.messages([STAMPED]) == whole


async def test_much_text_is_made_canonical_elsewhere_with_the_same_outcome() -> None:
    long = Message(SYSTEM, "Today is 2026-11-20.\n" * INLINE_SYSTEM_CHARS)
    asked = request(Contract.NATIVE, [long])
    there = await Canonicalizer().canonical_async(asked, None)
    assert there == Canonicalizer().canonical(asked, None)


@pytest.mark.parametrize("stamp", ["", "Today is 2026-11-29. "])
async def test_much_text_that_was_seen_before_is_looked_up_on_the_event_loop(stamp: str) -> None:
    long = Message(Role.SYSTEM, stamp + "Answer in the caller's language, and name your sources. " * 900)
    canonicalizer, offloaded = Canonicalizer(), 0

    async def offload(work: Callable[[], T], /) -> T:
        nonlocal offloaded
        offloaded += 1
        return work()

    asked = request(Contract.NATIVE, (STAMPED, long))
    first = await canonicalizer.canonical_async(asked, None, offload)
    assert await canonicalizer.canonical_async(asked, None, offload) == first and offloaded == 1
    other = request(Contract.NATIVE, (long,))  # findings have the number of their message
    assert (await canonicalizer.canonical_async(other, None, offload)) == Canonicalizer().canonical(
        other, None
    )


async def test_a_context_that_is_not_json_is_refused_wherever_it_is_found_out() -> None:
    for content in ("Hi.", "Hi.\n" * INLINE_SYSTEM_CHARS):
        asked = replace(request(Contract.NATIVE, [Message(SYSTEM, content)]), context={"a": object()})
        with pytest.raises(InvalidRequest):
            await Canonicalizer().canonical_async(asked, None)
