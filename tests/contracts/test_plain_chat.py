"""msgspec parses the body of an ordinary chat with the same result as pydantic, or leaves it to pydantic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.fields import MAX_LABEL, MAX_NAME, MAX_TOKENS, SEED_MAX, SEED_MIN
from gateway.contracts.openai import ChatRequest, chat_request
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.plain_chat import KnownTools
from gateway.contracts.plain_chat import plain_chat as read
from gateway.contracts.refusals import FEW_FIELDS_BYTES, MAX_FIELDS, check_fields, parse
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidRequest

ORIGIN = RequestOrigin(
    request_id="req_1",
    generation_id="gen_1",
    caller=Caller("shop", CallerRole.CALLER, "k1", max_priority=0),
    arrived_at=7.0,
    created=1_700_000_000,
    trace_id="0" * 31 + "1",
    allow_fallback=False,
    max_messages=4,
)
ORDINARY: dict[str, Any] = {
    "model": "base",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And now?"},
    ],
    "max_completion_tokens": 40,
    "temperature": 1,
    "top_p": 0.5,
    "seed": 7,
    "user": "someone",
    "stream": True,
    "stream_options": {"include_usage": True},
}


STOCK = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "Is a volume in stock?",
        "parameters": {"properties": {"title": {"type": "string"}}, "type": "object"},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"title":"Berserk"}'}}
AGENT: dict[str, Any] = {
    "model": "base",
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Is Berserk"}, {"type": "text", "text": " in?"}],
        },
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [CALL],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"stock":3}'},
    ],
    "tools": [STOCK],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
}


def plain_chat(body: bytes, origin: RequestOrigin) -> ParsedRequest | None:
    return read(body, origin, KnownTools())


def by_pydantic(body: bytes) -> ParsedRequest | str:
    try:
        return chat_request(parse(ChatRequest, body), ORIGIN)
    except InvalidRequest as error:
        return f"{error.param}: {error}"


def by_dialect(body: bytes) -> ParsedRequest | str:
    try:
        return OpenAIDialect(chat=True).parse(body, ORIGIN)
    except InvalidRequest as error:
        return f"{error.param}: {error}"


def test_an_ordinary_body_is_read_at_once() -> None:
    body = json.dumps(ORDINARY).encode()
    found = plain_chat(body, ORIGIN)
    assert found is not None and found == by_pydantic(body)
    assert (found.request.sampling.max_tokens, found.include_usage) == (40, True)


def test_the_body_of_an_agent_is_read_at_once_and_its_tools_once_for_all_its_requests() -> None:
    known, body = KnownTools(), json.dumps(AGENT).encode()
    first, again = read(body, ORIGIN, known), read(body, ORIGIN, known)
    assert first is not None and again is not None
    assert first == again == by_pydantic(body)
    assert again.request.tools is first.request.tools
    assert [call.name for call in first.request.messages[1].tool_calls] == ["stock"]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2}, {"tools": None}, {"tools": [STOCK], "tool_choice": {"type": "function"}}, {"sluice": {"route": "r"}}, {"unknown": 1}, {"stop": "x"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]},
    ],
)  # fmt: skip
def test_any_other_body_is_left_to_pydantic(more: dict[str, Any]) -> None:
    assert plain_chat(json.dumps({**ORDINARY, **more}).encode(), ORIGIN) is None


@pytest.mark.parametrize(
    ("item", "told"),
    [(b'{"a":1}', "fields"), (b"[[[]]]", "arrays"), (b"{  }", "objects"), (b"[ 1 ]", "arrays")],
)
def test_a_body_of_very_many_fields_objects_or_arrays_is_refused_first(item: bytes, told: str) -> None:
    body = b'{"messages":[' + b",".join([item] * (MAX_FIELDS + 1)) + b"]" + b" " * FEW_FIELDS_BYTES + b"}"
    assert by_dialect(body) == by_pydantic(body)
    assert f" {told}; allowed: {MAX_FIELDS} or fewer" in str(by_dialect(body))


@pytest.mark.parametrize("sign", [":", "[", "{", '\\"[', "\\\\["])
def test_signs_of_fields_and_arrays_in_a_text_are_not_counted(sign: str) -> None:
    body = json.dumps({"input": [sign * 2 * FEW_FIELDS_BYTES]}).encode()
    check_fields(body)


@pytest.mark.parametrize("end", ['"', "\\", '\\\n"'])
def test_a_text_without_an_end_is_read_once(end: str) -> None:
    body = b":" * (MAX_FIELDS + 1) + b'"' + b'\\"' * 200_000 + end.encode()
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="fields; allowed"):
        check_fields(body)
    assert time.process_time() - began < 2


PIECES = st.sampled_from(
    ['{"a":[{}]}', '"x"', r'"\""', r'"\\"', r'"\\\"{:["', '":"', '"' + "[" * 70_000 + '"']
)


@given(st.lists(PIECES, max_size=20), st.integers(0, 3))
@settings(max_examples=50)
def test_each_field_outside_of_texts_is_counted(pieces: list[str], more: int) -> None:
    fields = ["{}" for _ in range(MAX_FIELDS - 2 + more)]
    body = f'{{"input":[{",".join([*pieces, *fields])}]}}'
    objects = 1 + sum(2 for one in pieces if one.startswith("{")) + len(fields)
    try:
        check_fields(body.encode())
        assert objects <= MAX_FIELDS
    except InvalidRequest as error:
        assert f"has {objects} objects" in error.message and objects > MAX_FIELDS


def test_a_body_of_very_many_texts_is_counted_in_the_time_of_a_few_parses() -> None:
    body = b'{"input":[' + b'":",' * 300_000 + b'""]}'
    assert _least_s(lambda: check_fields(body)) < 6 * _least_s(lambda: json.loads(body))


def _least_s(act: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.process_time()
        act()
        took.append(time.process_time() - began)
    return min(took)


TEXTS = st.sampled_from(["", " ", "Hi", "Hi\x00", "a\tb", "日本", "\ud800", "x" * 129, "x" * 257]) | st.text(
    max_size=4
)
NUMBERS = st.sampled_from(
    [
        0,
        1,
        -1,
        2,
        1.0,
        0.5,
        1e-9,
        2.5,
        MAX_TOKENS,
        MAX_TOKENS + 1,
        SEED_MIN,
        SEED_MIN - 1,
        SEED_MAX,
        SEED_MAX + 1,
        10**30,
    ]
)
ANY: st.SearchStrategy[Any] = TEXTS | NUMBERS | st.booleans() | st.none() | st.just([]) | st.just({})
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "User"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES | ANY, "content": TEXTS | ANY}, optional={"name": ANY, "odd": ANY}),
    max_size=5,
)
BODIES = st.fixed_dictionaries(
    {"model": TEXTS | ANY, "messages": MESSAGES | st.just(ORDINARY["messages"]) | ANY},
    optional={
        "max_tokens": NUMBERS | ANY, "max_completion_tokens": NUMBERS | ANY, "temperature": NUMBERS | ANY,
        "top_p": NUMBERS | ANY, "seed": NUMBERS | ANY, "user": TEXTS | ANY, "stream": st.booleans() | ANY,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": ANY, "odd": ANY}) | ANY,
        "n": NUMBERS,
    },
)  # fmt: skip


@settings(max_examples=100)
@given(BODIES | st.builds(lambda more: {**ORDINARY, **more}, BODIES))
def test_every_body_becomes_the_same_request_or_the_same_refusal(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert by_dialect(data) == by_pydantic(data)


IDS = st.sampled_from(["c1", "c2", "", " ", "c\x00", "c\n"]) | ANY
FUNCTIONS = st.fixed_dictionaries(
    {}, optional={"name": st.just("stock") | TEXTS | ANY, "arguments": TEXTS | ANY, "odd": ANY}
)
CALLS = st.fixed_dictionaries(
    {"id": IDS},
    optional={
        "type": st.sampled_from(["function", "custom"]) | ANY,
        "function": FUNCTIONS | ANY,
        "index": ANY,
    },
)
AGENT_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={
        "content": TEXTS | ANY | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS | ANY})),
        "tool_calls": st.lists(CALLS | st.just(CALL), max_size=2) | ANY, "tool_call_id": IDS,
        "reasoning": TEXTS | ANY, "reasoning_content": TEXTS | ANY, "refusal": TEXTS | ANY, "name": TEXTS,
    },
)  # fmt: skip
TOOLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom"])},
    optional={
        "function": st.fixed_dictionaries(
            {"name": st.just("stock") | TEXTS}, optional={"parameters": ANY, "description": ANY, "strict": ANY}
        ),
        "custom": st.fixed_dictionaries({"name": TEXTS}), "odd": ANY, "cache_control": ANY,
    },
)  # fmt: skip
CHOICES = st.sampled_from(["auto", "none", "required", "other"])
AGENT_BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(AGENT_MESSAGES | st.sampled_from(AGENT["messages"]), max_size=4),
        "tools": st.lists(TOOLS | st.just(STOCK), max_size=2) | ANY, "tool_choice": CHOICES | ANY,
        "parallel_tool_calls": ANY, "reasoning_effort": st.sampled_from(["none", "high", "odd"]) | ANY,
    },
)  # fmt: skip


@settings(max_examples=200)
@given(st.builds(lambda more: {**AGENT, **more}, AGENT_BODIES))
def test_every_agents_body_becomes_the_same_request_or_the_same_refusal(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert by_dialect(data) == by_pydantic(data)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'{"model":"base"}', b'\xff{"model":"base"}',
        b'{"model":"base","model":"other","messages":[{"role":"user","content":"Hi","content":"Ho"}]}',
        b'{"model":"base","messages":[{"role":"user","content":"Hi"}],"temperature":NaN}',
        b'{"model":"base","messages":[{"role":"user","content":"Hi"}],"max_tokens":1.0}',
        b'{"model":"base","messages":[{"role":"user","content":"Hi"}],"max_tokens":1e2}',
        b'{"model":"base","messages":[{"role":"user","content":"\\u0048i\\ud83d\\ude00"}]} \n',
        b'{"model":"base","messages":[{"role":"user","content":"Hi"}]}x',
        b'{"model":"base","messages":[{"role":"user","content":"H\x01i"}]}',
    ],
)  # fmt: skip
def test_every_text_becomes_the_same_request_or_the_same_refusal(body: bytes) -> None:
    assert by_dialect(body) == by_pydantic(body)


def test_the_longest_name_and_label_are_taken() -> None:
    body = json.dumps({**ORDINARY, "model": "m" * MAX_NAME, "user": "u" * MAX_LABEL}).encode()
    assert plain_chat(body, ORIGIN) == by_pydantic(body)
