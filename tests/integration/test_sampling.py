"""Sampling, several choices, log-probabilities and shaped answers, by the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.integration.live import ADMIN_KEY, LiveGateway

TURNS: Any = [{"role": "user", "content": "Who wrote Berserk?"}]
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 16},
        "volume": {"type": "integer", "minimum": 1, "maximum": 99},
        "genre": {"enum": ["seinen", "shonen"]},
    },
    "required": ["title", "volume", "genre"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(live: LiveGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=TURNS, **{"max_tokens": 60, **fields})


def said(client: openai.OpenAI, **fields: Any) -> str:
    return str(chat(client, **fields).choices[0].message.content)


def refused(client: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, **fields)
    return raised.value


def test_three_choices_are_three_texts_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 7}
    whole = chat(client, **asked)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    alone = chat(client, temperature=1.0, seed=8)
    assert alone.choices[0].message.content == texts[1], "the second choice is drawn with the next seed"
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens > alone.usage.completion_tokens

    pieces, ends = {0: "", 1: "", 2: ""}, {}
    chunks = list(chat(client, **asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    assert list(pieces.values()) == texts
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_further_choices_take_the_prompt_from_the_prefix_cache(
    client: openai.OpenAI, live: LiveGateway
) -> None:
    live.wait_until_idle()
    hits = live.metric("vllm:prefix_cache_hits_total")
    asked = client.completions.create(model="demo", prompt="volume " * 200, n=4, max_tokens=2, seed=1)
    live.wait_until_idle()
    assert asked.usage is not None and asked.usage.prompt_tokens > 100
    assert asked.usage.prompt_tokens_details is not None
    assert asked.usage.prompt_tokens_details.cached_tokens == 0
    assert live.metric("vllm:prefix_cache_hits_total") - hits > 2 * asked.usage.prompt_tokens


def test_logprobs_have_an_entry_a_token_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"logprobs": True, "top_logprobs": 4, "temperature": 0}
    whole = chat(client, **asked)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text.startswith(whole.choices[0].message.content)
    for entry in content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0, "greedy takes the best"
    streamed = [
        entry
        for chunk in chat(client, **asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content])


def test_a_text_completions_logprobs_point_into_its_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="Berserk is", max_tokens=8, temperature=0, logprobs=2
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens).startswith(choice.text)
    assert logprobs.text_offset[0] == 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if offset < len(choice.text):
            assert choice.text[offset:].startswith(token)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed(client: openai.OpenAI, stream: bool) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "book", "schema": BOOK, "strict": True}}
    for seed in range(4):
        asked = {"response_format": shape, "temperature": 1.0, "seed": seed, "max_tokens": 120}
        if stream:
            chunks = chat(client, **asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = said(client, **asked)
        jsonschema.validate(json.loads(text), BOOK)


def test_a_schema_is_followed_in_the_native_contract(live: LiveGateway) -> None:
    body = {
        "messages": TURNS,
        "response_format": {"type": "json_schema", "json_schema": BOOK},
        "sampling": {"max_tokens": 120},
    }
    answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60).json()
    jsonschema.validate(json.loads(answer["output_text"]), BOOK)
    assert (answer["finish_reason"], answer["warnings"]) == ("stop", [])


def test_choice_regex_and_grammar_are_followed(client: openai.OpenAI) -> None:
    choices = ["Kentaro Miura", "Makoto Yukimura"]
    assert said(client, extra_body={"guided_choice": choices}) in choices
    assert said(client, extra_body={"structured_outputs": {"choice": choices}}) in choices
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", said(client, extra_body={"guided_regex": "[A-Z]{3}-[0-9]{2}"}))
    assert said(client, extra_body={"guided_grammar": 'root ::= "vol. " [1-9]'})[:5] == "vol. "


def test_max_tokens_may_cut_a_shaped_answer(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"guided_regex": "([a-z] ){40}"}, max_tokens=3)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"extra_body": {"guided_regex": "(a"}}, "unclosed group"),
        ({"extra_body": {"guided_grammar": "root ::= missing"}}, "missing"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "wish"}},
                }
            },
            "wish",
        ),
    ],
)
def test_a_bad_shape_is_refused_by_name_and_harms_nobody(
    client: openai.OpenAI, fields: dict[str, Any], problem: str
) -> None:
    error = refused(client, **fields)
    (named,) = fields.get("extra_body", fields)
    assert error.type == "invalid_request_error"
    assert error.param in (named, f"{named}.json_schema")
    assert problem in error.message
    assert "Miura" in said(client, temperature=0)


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"type": "integer", "multipleOf": 999_979}, "0.5 s of processor time"),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 10**9}, "128 MiB of memory"),
    ],
)
def test_a_schema_that_would_stop_the_engine_is_refused_while_others_are_answered(
    client: openai.OpenAI, live: LiveGateway, schema: dict[str, Any], bound: str
) -> None:
    with ThreadPoolExecutor(1) as attacker:
        attack = attacker.submit(
            refused,
            client,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        book = {"type": "json_schema", "json_schema": {"name": "book", "schema": {**BOOK, "title": bound}}}
        jsonschema.validate(json.loads(said(client, response_format=book)), BOOK)
        assert httpx.get(f"{live.url}/ping").status_code == 200
        error = attack.result()
    assert (error.status_code, error.code) == (400, "grammar_too_complex")
    assert error.param == "response_format.json_schema" and bound in error.message


def test_penalties_and_min_p_change_the_answer_and_a_banned_token_never_comes(
    client: openai.OpenAI, live: LiveGateway
) -> None:
    usual = said(client, temperature=0)
    assert usual == said(client, temperature=0, extra_body={"min_p": 0.5, "repetition_penalty": 1.0})

    def bias(text: str, value: float) -> dict[str, float]:
        body = {"model": "demo", "prompt": text, "add_special_tokens": False}
        tokens = httpx.post(f"{live.url}/tokenize", json=body, headers=live.headers, timeout=60).json()[
            "tokens"
        ]
        return {str(token): value for token in tokens}

    first = usual.split()[0]
    assert not said(client, temperature=0, logit_bias=bias(first, -100)).startswith(first)
    pushed = bias(" the", 40)
    assert said(client, temperature=0, logit_bias=pushed).count(" the") == 60
    for penalties in ({"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 10.0}}):
        assert 0 < said(client, temperature=0, logit_bias=pushed, **penalties).count(" the") < 40


def test_a_bias_for_an_unknown_token_is_refused(client: openai.OpenAI) -> None:
    assert "logit_bias" in refused(client, logit_bias={"999999": 1}).message


def test_leaving_a_stream_of_several_choices_frees_them_all(client: openai.OpenAI, live: LiveGateway) -> None:
    stream = chat(client, n=8, temperature=1.0, max_tokens=2000, stream=True, logit_bias={"2": -100})
    for _ in range(20):
        next(stream)
    assert live.metric("vllm:num_requests_running") > 1
    stream.close()
    live.wait_until_idle()
