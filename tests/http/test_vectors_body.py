"""The body of an answer with vectors: its form, and where it is written."""

from __future__ import annotations

import json
import threading
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from gateway.contracts.embeddings import Conversation, EmbeddingsAnswer, EmbeddingsBody, embeddings_request
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidRequest
from gateway.http.embeddings import vectors_body

NUMBERS = array("f", [-0.0, 1e-42, 0.1, -3.25])


class ThreadRecorder(list[str]):
    """Vectors that note in which thread they were last read."""

    thread = 0

    def __iter__(self) -> Iterator[str]:
        self.thread = threading.get_ident()
        return super().__iter__()


@pytest.mark.parametrize("form", ["float", "base64", None])
@pytest.mark.parametrize("count", [1, 3])
async def test_both_forms_hold_the_same_numbers_in_order(
    form: Literal["float", "base64"] | None, count: int
) -> None:
    vectors = [array("f", [number, *NUMBERS]).tobytes() for number in range(count)]
    answer = EmbeddingsAnswer("bge", [b64encode(one).decode() for one in vectors], 7)
    asked = EmbeddingsBody(model="bge", input="a", encoding_format=form)
    body = json.loads(await vectors_body(answer, asked))
    assert (body["object"], body["model"]) == ("list", "bge")
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", at) for at in range(count)
    ]
    found = [one["embedding"] for one in body["data"]]
    got = [b64decode(one) if form == "base64" else array("f", one).tobytes() for one in found]
    assert got == vectors


@pytest.mark.parametrize(
    ("form", "vectors", "on_the_loop"),
    [("float", 8, True), ("float", 64, False), ("base64", 32, True), ("base64", 64, False)],
)
async def test_a_large_body_is_written_off_the_loop(
    form: Literal["float", "base64"], vectors: int, on_the_loop: bool
) -> None:
    one = b64encode(array("f", [0.25] * 1_024)).decode()
    noted = ThreadRecorder([one] * vectors)
    asked = EmbeddingsBody(model="bge", input="a", encoding_format=form)
    await vectors_body(EmbeddingsAnswer("bge", noted, 1), asked)
    assert (noted.thread == threading.get_ident()) is on_the_loop


ORIGIN = RequestOrigin("r", "g", Caller("acme", CallerRole.CALLER, "key_1"), 0.0, 0, "t", max_messages=2)
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b"},
]


def asked_for(**given: Any) -> Any:
    return embeddings_request(parse(EmbeddingsBody, json.dumps({"model": "m", **given}).encode()), ORIGIN)


@pytest.mark.parametrize("empty", [{"user": ""}, {"user": None}, {"encoding_format": None}])
def test_a_field_of_embeddings_that_asks_for_nothing_is_accepted(empty: dict[str, Any]) -> None:
    assert asked_for(input="a", **empty) == asked_for(input="a")


def test_a_text_of_no_tokens_is_refused_by_the_field_that_asks_for_it() -> None:
    assert asked_for(input="a", truncate_prompt_tokens=-1).truncate_to == -1
    with pytest.raises(InvalidRequest, match="is 0; allowed: -1, or 1 or more") as refused:
        asked_for(input="a", truncate_prompt_tokens=0)
    assert refused.value.param == "truncate_prompt_tokens"


def test_messages_are_one_input_as_they_were_given() -> None:
    assert asked_for(messages=TALK).inputs == (Conversation(tuple(TALK)),)


def test_each_conversation_of_a_list_is_an_input() -> None:
    both = (Conversation(tuple(TALK)), Conversation(tuple(TALK[:1])))
    assert asked_for(messages=[TALK, TALK[:1]]).inputs == both


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": TALK}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": TALK * 2}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [TALK, []]}, "messages.1"),
        ({"messages": [TALK, TALK * 2]}, "messages.1"),
        ({"messages": [TALK] * 2_049}, "messages"),
        ({"messages": [[{"role": "tool", "content": "a"}]]}, "messages.0.0.role"),
        ({"messages": TALK, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_a_conversation_that_cannot_be_served_is_refused_by_its_field(
    given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked_for(**given)
    assert refused.value.param == param
