from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.values import EvidenceChunk, ImageContent, Message, Role
from gateway.contracts.features import Feature
from gateway.contracts.native import NativeRequest, to_request
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import MAX_FIELDS, parse
from gateway.contracts.values import (
    Caller,
    CallerRole,
    Contract,
    FormatType,
    GenerateRequest,
    ResponseFormat,
    Sampling,
)
from gateway.errors import InvalidJson, InvalidRequest

SECRET = "the caller's private words"
ORIGIN = RequestOrigin(
    request_id="req_edge",
    generation_id="gen_1",
    caller=Caller("acme", CallerRole.CALLER, "key_1", max_priority=0),
    arrived_at=100.0,
    created=1_800_000_000,
    trace_id="a" * 32,
    trace_parent=None,
    max_messages=4,
)
TURN = {"role": "user", "content": SECRET}


def read(body: Any) -> GenerateRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return to_request(parse(NativeRequest, raw), ORIGIN)


def test_the_smallest_request_is_one_user_turn() -> None:
    request = read({"messages": [TURN]})
    assert request.messages == (Message(Role.USER, SECRET),)
    assert request.contract is Contract.NATIVE
    assert request.route == "self_hosted_generation"
    assert request.request_id == "req_edge"
    assert request.sampling == Sampling()
    assert request.deadline is None
    assert request.trace_id == "a" * 32


def part(url: object, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def test_a_content_in_parts_is_that_of_a_chat() -> None:
    url = "https://example.org/a.png"
    content = [{"type": "text", "text": "This"}, part(url), {"type": "text", "text": " or?"}]
    request = read({"messages": [{"role": "user", "content": content}]})
    image = ImageContent(url, None, "messages.0.content.1.image_url.url")
    assert request.messages == (Message(Role.USER, "This or?", parts=("This", image, " or?")),)
    assert request.needs == {Feature.IMAGES}
    chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
    asked = OpenAIDialect(chat=True).parse(json.dumps(chat).encode(), ORIGIN).request
    assert asked.messages == request.messages
    texts = read({"messages": [{"role": "user", "content": content[:1]}]})
    assert texts.messages == (Message(Role.USER, "This"),) and not texts.needs


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text"}], "messages.0.content.0.text"),
        ([{"type": "image_url"}], "messages.0.content.0.image_url"),
        ([part(None)], "messages.0.content.0.image_url.url"),
        ([part("data:,x", size=3)], "messages.0.content.0.size"),
        ([{"type": "input_audio"}], "messages.0.content.0.type"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused_by_its_place(content: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read({"messages": [{"role": "user", "content": content}]})
    assert refused.value.param == param


def test_every_field_reaches_the_inside() -> None:
    request = read(
        {
            "request_id": "mine",
            "session_id": "s",
            "route": "r",
            "intent": "i",
            "locale": "ja",
            "adapter_id": "a",
            "prompt_version": "p",
            "messages": [{"role": "system", "content": ""}, {"role": "assistant", "content": ""}, TURN],
            "retrieval_chunks": [
                {"chunk_id": "c1", "source_type": "catalog", "text": "t", "score": 0.5},
                {"chunk_id": "c2", "source_type": "review", "text": "u"},
            ],
            "context": {"time": "now", "deep": [1, {"x": None}]},
            "sampling": {
                "max_tokens": 7,
                "temperature": 0,
                "top_p": 1,
                "top_k": -1,
                "stop": ["\n"],
                "seed": -5,
            },
            "response_format": {"type": "json_object"},
            "priority": 1,
            "deadline_ms": 1500,
            "stream": True,
        }
    )
    assert (request.request_id, request.session_id, request.route) == ("mine", "s", "r")
    assert (request.intent, request.locale) == ("i", "ja")
    assert (request.adapter_id, request.prompt_version) == ("a", "p")
    assert [one.role for one in request.messages] == [Role.SYSTEM, Role.ASSISTANT, Role.USER]
    assert request.chunks == (
        EvidenceChunk("c1", "catalog", "t", 0.5),
        EvidenceChunk("c2", "review", "u", None),
    )
    assert request.context == {"time": "now", "deep": [1, {"x": None}]}
    assert request.sampling == Sampling(
        max_tokens=7, temperature=0.0, top_p=1.0, top_k=-1, stop=("\n",), seed=-5
    )
    assert request.response_format == ResponseFormat(FormatType.JSON_OBJECT)
    assert request.deadline == 101.5
    assert request.stream


def test_the_priority_is_capped_by_the_key() -> None:
    assert read({"messages": [TURN], "priority": 1}).priority == 0
    assert read({"messages": [TURN], "priority": -1}).priority == -1


@pytest.mark.parametrize(
    "wrapped", [True, False], ids=["openai's object with name and schema", "a bare schema"]
)
def test_a_schema_is_taken_wrapped_or_bare(wrapped: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given_schema = {"name": "n", "schema": schema, "strict": True} if wrapped else schema
    body = {
        "messages": [TURN],
        "response_format": {"type": "json_schema", "json_schema": given_schema},
    }
    shape = read(body).response_format
    assert shape.type is FormatType.JSON_SCHEMA
    assert json.loads(shape.spec) == schema


def test_a_stop_may_be_a_single_string() -> None:
    assert read({"messages": [TURN], "sampling": {"stop": "\n"}}).sampling.stop == ("\n",)


REFUSED: list[tuple[str, Any, str | None, str]] = [
    ("no messages field", {}, "messages", "missing"),
    ("no messages", {"messages": []}, "messages", "1 to 4"),
    ("too many messages", {"messages": [TURN] * 5}, "messages", "1 to 4"),
    ("an array", [], None, "an object"),
    ("an unknown field", {"messages": [TURN], "temprature": 1}, "temprature", "not a known field"),
    (
        "an unknown inner field",
        {"messages": [{**TURN, "mood": "x"}]},
        "messages.0.mood",
        "not a known field",
    ),
    ("text for a number", {"messages": [TURN], "deadline_ms": "5"}, "deadline_ms", "an integer"),
    ("a boolean for a number", {"messages": [TURN], "priority": True}, "priority", "an integer"),
    ("a fraction for an integer", {"messages": [TURN], "priority": 0.5}, "priority", "an integer"),
    ("a number for text", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a string"),
    ("no tokens", {"messages": [TURN], "sampling": {"max_tokens": 0}}, "sampling.max_tokens", "1 or more"),
    (
        "negative tokens",
        {"messages": [TURN], "sampling": {"max_tokens": -9}},
        "sampling.max_tokens",
        "1 or more",
    ),
    (
        "too hot",
        {"messages": [TURN], "sampling": {"temperature": 2.1}},
        "sampling.temperature",
        "2.0 or less",
    ),
    ("no nucleus", {"messages": [TURN], "sampling": {"top_p": 0}}, "sampling.top_p", "more than 0"),
    ("negative top_k", {"messages": [TURN], "sampling": {"top_k": -2}}, "sampling.top_k", "-1 or more"),
    (
        "an empty stop",
        {"messages": [TURN], "sampling": {"stop": [""]}},
        "sampling.stop.0",
        "1 character or more",
    ),
    (
        "an empty stop alone",
        {"messages": [TURN], "sampling": {"stop": ""}},
        "sampling.stop",
        "1 character or more",
    ),
    ("17 stops", {"messages": [TURN], "sampling": {"stop": ["a"] * 17}}, "sampling.stop", "16 items"),
    ("a seed beyond 64 bits", {"messages": [TURN], "sampling": {"seed": 2**63}}, "sampling.seed", "or less"),
    ("a huge seed", {"messages": [TURN], "sampling": {"seed": 10**300}}, "sampling.seed", "beyond 64 bits"),
    ("no deadline", {"messages": [TURN], "deadline_ms": 0}, "deadline_ms", "1 or more"),
    ("a wrong priority", {"messages": [TURN], "priority": 2}, "priority", "1 or less"),
    (
        "a foreign role",
        {"messages": [{"role": "function", "content": "x"}]},
        "messages.0.role",
        "'assistant'",
    ),
    (
        "an answer as the last message",
        {"messages": [TURN, {"role": "assistant", "content": "x"}]},
        "messages.1.role",
        "'user' or 'tool' in the last",
    ),
    ("a blank turn", {"messages": [{"role": "user", "content": " \n"}]}, "messages.0.content", "blank"),
    (
        "a null character",
        {"messages": [{"role": "user", "content": "a\x00b"}]},
        "messages.0.content",
        "null character",
    ),
    ("a null character in the context", {"messages": [TURN], "context": {"k": "\0"}}, "context.k", "null"),
    (
        "a context of many values",
        {"messages": [TURN], "context": {"k": [""] * 50_000}},
        "context",
        "50000",
    ),
    ("an integer beyond 64 bits", {"messages": [TURN], "context": {"k": 2**70}}, "context.k", "64 bits"),
    ("a blank id", {"messages": [TURN], "request_id": " "}, "request_id", "printable"),
    ("a long id", {"messages": [TURN], "request_id": "x" * 129}, "request_id", "128 characters"),
    (
        "a schema that is missing",
        {"messages": [TURN], "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "required",
    ),
]


@pytest.mark.parametrize(
    ("body", "param", "message"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_does_not_validate_is_refused_by_its_path(body: Any, param: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(body)
    assert refused.value.param == param
    assert message in refused.value.message
    assert SECRET not in refused.value.message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"sampling":{"temperature":%s}', "sampling.temperature"),
        ('"sampling":{"max_tokens":%s}', "sampling.max_tokens"),
        ('"context":{"a":[%s]}', "context.a.0"),
        ('"retrieval_chunks":[{"chunk_id":"c","source_type":"s","text":"t","score":%s}]', None),
    ],
)
def test_numbers_that_are_not_finite_are_refused(number: str, field: str, param: str | None) -> None:
    raw = '{"messages":[{"role":"user","content":"hi"}],' + field % number + "}"
    with pytest.raises(InvalidRequest) as refused:
        read(raw.encode())
    assert refused.value.param == (param or "retrieval_chunks.0.score")


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00x", "\\ud800\\ud800"])
def test_a_lone_surrogate_is_refused_by_its_path(escape: str) -> None:
    raw = '{"messages":[{"role":"user","content":"ESCAPE"}]}'.replace("ESCAPE", escape)
    with pytest.raises(InvalidRequest) as refused:
        read(raw.encode())
    assert refused.value.param == "messages.0.content"
    assert "surrogate" in refused.value.message


def test_a_body_that_is_only_a_lone_surrogate_is_named_as_the_body() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(b'"\\ud800"')
    assert refused.value.message == "the body contains a lone surrogate; allowed: valid Unicode text"
    assert refused.value.param is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b'{"messages":[}',
        b'{"messages":"\xff"}',
        b'{"messages":' + b"[" * 100_000,
        b'{"a":' * 5_000,
        b'{"priority":' + b"9" * 5_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=[
        "empty",
        "cut",
        "words",
        "broken",
        "not UTF-8",
        "deep",
        "deep objects",
        "digits",
        "a byte order mark",
    ],
)
def test_what_is_not_json_is_told_as_such(raw: bytes) -> None:
    with pytest.raises(InvalidJson) as refused:
        read(raw)
    assert refused.value.status == 400


def test_a_context_nested_deeper_than_32_levels_is_refused() -> None:
    context: Any = 1
    for _ in range(40):
        context = {"a": context}
    with pytest.raises(InvalidRequest, match="deeper than 32"):
        read({"messages": [TURN], "context": context})


def test_a_field_name_is_shortened_and_printable_in_messages() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read({"messages": [TURN], "\n\x00" + "x" * 1_000: 1})
    assert refused.value.param is not None
    assert len(refused.value.param) < 80
    assert refused.value.message.isprintable()


def test_many_unknown_fields_are_refused_by_the_first() -> None:
    fields = ",".join(f'"u{number}":0' for number in range(40_000))
    with pytest.raises(InvalidRequest) as refused:
        read(('{"messages":[{"role":"user","content":"hi"}],' + fields + "}").encode())
    assert refused.value.param == "u0"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = st.sampled_from(sorted(NativeRequest.model_fields))


@given(st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_json_under_known_names_is_a_request_or_a_refusal(fields: dict[str, Any]) -> None:
    try:
        read(json.dumps({"messages": [TURN], **fields}).encode())
    except InvalidRequest as refused:
        assert refused.message.isprintable()
        assert SECRET not in refused.message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(raw)


@given(st.text(min_size=1).filter(lambda text: bool(text.strip()) and "\x00" not in text))
def test_any_text_arrives_as_it_was_sent(text: str) -> None:
    assert read({"messages": [{"role": "user", "content": text}]}).messages[-1].content == text


def test_a_body_of_very_many_fields_is_refused_before_they_are_collected() -> None:
    many = b"{" + b",".join(b'"k%d": 1' % number for number in range(MAX_FIELDS + 1)) + b"}"
    with pytest.raises(InvalidRequest, match="50001 fields; allowed: 50000 or fewer"):
        parse(NativeRequest, many)
    colons = json.dumps({"messages": [{"role": "user", "content": '"a": ' * MAX_FIELDS}]}).encode()
    assert parse(NativeRequest, colons).messages[0].role == "user"
