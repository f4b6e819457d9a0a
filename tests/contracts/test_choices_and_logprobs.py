"""Several choices, and log-probabilities, in OpenAI's formats, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.contracts.answer import Answer, Choice
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.events import Delta
from gateway.contracts.openai_logprobs import Offsets
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.values import FinishReason, TokenLogprob
from gateway.testing import answer_for
from tests.contracts.test_stream_frames import REQUEST, events

HALVES = ("日".encode()[:2], "日".encode()[2:])
TOKENS = (
    TokenLogprob(b"Hi", -0.25, (TokenLogprob(b"Hi", -0.25), TokenLogprob(b"Yo", -1.5))),
    TokenLogprob(HALVES[0], -3.0, (TokenLogprob(b" a", -0.5), TokenLogprob(b" b", -0.75))),
    TokenLogprob(HALVES[1], -0.5, ()),
    TokenLogprob(b"<end>", -0.125, ()),
)


def answer(**changes: Any) -> Answer:
    return answer_for(REQUEST, "Hi日", logprobs=TOKENS, **changes)


def test_a_chats_logprobs_have_text_and_bytes_of_every_token() -> None:
    body = json.loads(OpenAIDialect(chat=True).whole(ParsedRequest(REQUEST), answer()))
    choice = ChatCompletion.model_validate(body, strict=True).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first, half, rest, end = choice.logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("Hi", [72, 105], -0.25)
    assert [(one.token, one.logprob) for one in first.top_logprobs] == [("Hi", -0.25), ("Yo", -1.5)]
    assert (half.token, half.bytes) == ("\ufffd", list(HALVES[0]))
    assert bytes([*(half.bytes or []), *(rest.bytes or [])]).decode() == "日"
    assert end.token == "<end>" and end.top_logprobs == []


def test_a_completions_logprobs_are_parallel_lists_and_show_the_token_that_came() -> None:
    body = json.loads(OpenAIDialect(chat=False).whole(ParsedRequest(REQUEST), answer()))
    logprobs = Completion.model_validate(body, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hi", "\ufffd", "\ufffd", "<end>"]
    assert logprobs.token_logprobs == [-0.25, -3.0, -0.5, -0.125]
    assert logprobs.text_offset == [0, 2, 2, 3]
    assert logprobs.top_logprobs == [
        {"Hi": -0.25, "Yo": -1.5},
        {" a": -0.5, " b": -0.75, "\ufffd": -3.0},
        {"\ufffd": -0.5},
        {"<end>": -0.125},
    ]


@given(st.text(), st.lists(st.integers(1, 5), min_size=1))
def test_offsets_count_characters_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    data, offsets, at, turn = text.encode(), Offsets(), 0, 0
    while at < len(data):
        piece = data[at : at + cuts[turn % len(cuts)]]
        assert offsets.of(piece) == len(data[:at].decode(errors="ignore"))
        at, turn = at + len(piece), turn + 1


@pytest.mark.parametrize("dialect", [OpenAIDialect(chat=True), OpenAIDialect(chat=False)])
def test_every_choice_has_its_index_text_and_end(dialect: OpenAIDialect) -> None:
    several = answer_for(
        REQUEST,
        "one",
        others=(Choice("two", FinishReason.LENGTH), Choice("", FinishReason.STOP, TOKENS[:1])),
    )
    choices = json.loads(dialect.whole(ParsedRequest(REQUEST), several))["choices"]
    texts = [one.get("text", one.get("message", {}).get("content")) for one in choices]
    assert texts == ["one", "two", ""]
    assert [one["index"] for one in choices] == [0, 1, 2]
    assert [one["finish_reason"] for one in choices] == ["stop", "length", "stop"]
    assert [one["logprobs"] is None for one in choices] == [True, True, False]


@pytest.mark.parametrize("usage", [False, True])
def test_a_chats_stream_of_several_choices_tells_each_role_once_and_each_end(usage: bool) -> None:
    stream = OpenAIDialect(chat=True).frames(ParsedRequest(REQUEST, usage))
    data = (
        stream.opening
        + stream.delta(Delta("b", 1, index=1))
        + stream.delta(Delta("a", 1))
        + stream.delta(Delta("bb", 1, index=1))
    )
    closing = answer_for(
        REQUEST, "a", others=(Choice("bbb", FinishReason.LENGTH), Choice("", FinishReason.STOP))
    )
    *chunks, done = events(data + stream.finish(closing))
    assert done == b"[DONE]"
    if usage:
        assert chunks.pop()["usage"]["total_tokens"] == 979
    parsed = [ChatCompletionChunk.model_validate(chunk).choices[0] for chunk in chunks]
    for index, text, end in ((0, "a", "stop"), (1, "bbb", "length"), (2, "", "stop")):
        mine = [one for one in parsed if one.index == index]
        assert [one.delta.role for one in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(one.delta.content or "" for one in mine) == text
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [end]
    assert sum("sluice" in chunk for chunk in chunks) == (0 if usage else 1)


@pytest.mark.parametrize("chat", [True, False])
def test_a_streams_logprobs_joined_are_those_of_the_whole(chat: bool) -> None:
    dialect = OpenAIDialect(chat=chat)
    stream = dialect.frames(ParsedRequest(REQUEST))
    data = (
        stream.delta(Delta("Hi", 1, logprobs=TOKENS[:1]))
        + stream.delta(Delta("", 1, logprobs=TOKENS[1:2]))
        + stream.delta(Delta("日", 1, logprobs=TOKENS[2:]))
    )
    pieces = [event["choices"][0]["logprobs"] for event in events(data)]
    whole = json.loads(dialect.whole(ParsedRequest(REQUEST), answer()))["choices"][0]["logprobs"]
    for name, value in whole.items():
        assert (value or []) == [one for piece in pieces for one in piece[name] or []]
