"""A real gateway, the real engine and the demo model, asked by real clients."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
import websockets

from tests.integration.live import ADMIN_KEY, LiveGateway
from tests.sse import json_events

QUESTION = "Who wrote Berserk?"


def ask(live: LiveGateway, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": QUESTION}], **fields}
    return httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)


def sse(text: str) -> list[dict[str, object]]:
    return list(json_events(text.split("\n")))


def test_a_question_gets_a_sensible_answer_in_the_native_contract(live: LiveGateway) -> None:
    response = ask(live, sampling={"temperature": 0})
    assert response.status_code == 200
    answer = response.json()
    assert "Miura" in answer["output_text"]
    assert answer["finish_reason"] == "stop"
    assert (answer["backend"], answer["backend_version"], answer["fallback"]) == ("embedded", "demo", None)
    budget = answer["budget"]
    sections = ("system", "retrieval", "recent_turns", "older_summary")
    assert sum(budget[name] for name in sections) == answer["usage"]["input_tokens"]
    assert response.headers["x-trace-id"] == answer["trace_id"]
    assert response.headers["x-request-id"] == answer["request_id"]


def test_a_stream_is_the_same_answer_in_pieces(live: LiveGateway) -> None:
    whole = ask(live, sampling={"temperature": 0}).json()["output_text"]
    events = sse(ask(live, sampling={"temperature": 0}, stream=True).text)
    assert [event["type"] for event in events] == ["token"] * (len(events) - 1) + ["done"]
    assert "".join(str(event.get("delta", "")) for event in events) == whole
    assert "output_text" not in events[-1] and events[-1]["usage"]


async def test_a_websocket_gives_the_same_events_and_closes_normally(live: LiveGateway) -> None:
    url = live.url.replace("http", "ws") + "/v1/generate/ws"
    async with websockets.connect(url, additional_headers=live.headers) as socket:
        await socket.send(
            json.dumps({"messages": [{"role": "user", "content": QUESTION}], "sampling": {"temperature": 0}})
        )
        events = [json.loads(message) async for message in socket]
    assert events[-1]["type"] == "done"
    assert "Miura" in "".join(event.get("delta", "") for event in events)
    assert socket.close_code == 1000


def test_the_openai_client_works_unchanged_streaming_included(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0)  # type: ignore[call-overload]
    assert "Miura" in whole.choices[0].message.content
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="demo", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert next(iter(client.models.list())).id == "demo"
    completion = client.completions.create(model="demo", prompt="Berserk is", max_tokens=5, temperature=0)
    assert completion.usage is not None and completion.usage.completion_tokens <= 5


def test_a_list_of_prompts_gets_the_texts_that_each_gets_alone(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0)
    prompts = ["Berserk is", "The shop sells", "A volume of"]
    alone = [
        client.completions.create(model="demo", prompt=one, max_tokens=4, temperature=0) for one in prompts
    ]
    batch = client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0)
    assert [one.text for one in batch.choices] == [one.choices[0].text for one in alone]
    assert [one.index for one in batch.choices] == [0, 1, 2]
    assert batch.usage is not None
    used = [one.usage for one in alone if one.usage is not None]
    assert batch.usage.prompt_tokens == sum(one.prompt_tokens for one in used)
    assert batch.usage.completion_tokens == sum(one.completion_tokens for one in used)
    stream = client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in batch.choices]


def test_openai_errors_raise_the_clients_own_exceptions(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=messages)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=messages, temperature=9)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="demo", messages=messages)  # type: ignore[arg-type]


def test_tokenize_counts_what_the_prompt_costs(live: LiveGateway) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "こんにちは"}]
    counted = httpx.post(
        f"{live.url}/tokenize", json={"messages": messages}, headers=live.headers, timeout=60
    ).json()
    answered = httpx.post(
        f"{live.url}/v1/chat/completions",
        json={"model": "demo", "messages": messages, "max_tokens": 4},
        headers=live.headers,
        timeout=60,
    ).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    text = httpx.post(
        f"{live.url}/detokenize",
        json={"tokens": counted["tokens"]},
        headers=live.headers,
        timeout=60,
    ).json()
    assert "こんにちは" in text["prompt"]


def test_no_character_is_split_over_two_deltas(live: LiveGateway) -> None:
    body = {
        "messages": [{"role": "user", "content": "ベルセルクの作者は誰ですか？"}],
        "stream": True,
        "sampling": {"temperature": 0},
    }
    events = sse(httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60).text)
    deltas = [str(event["delta"]) for event in events if event["type"] == "token"]
    assert deltas and not any("\ufffd" in delta for delta in deltas)
    assert any(ord(character) > 0x3000 for delta in deltas for character in delta)


def test_a_seed_gives_the_same_answer_whatever_else_runs(live: LiveGateway) -> None:
    async def many() -> list[str]:
        async with httpx.AsyncClient(headers=live.headers, timeout=60) as client:
            body = {
                "messages": [{"role": "user", "content": QUESTION}],
                "sampling": {"temperature": 1.0, "seed": 7},
            }
            noise = {
                "messages": [{"role": "user", "content": "Tell me about shipping"}],
                "sampling": {"temperature": 1.0},
            }
            answers = await asyncio.gather(
                *(
                    client.post(f"{live.url}/v1/generate", json=body if i % 3 == 0 else noise)
                    for i in range(12)
                )
            )
            return [a.json()["output_text"] for a in answers[::3]]

    assert len(set(asyncio.run(many()))) == 1


def test_an_idempotency_key_generates_once(live: LiveGateway) -> None:
    headers = {**live.headers, "Idempotency-Key": f"key-{time.monotonic_ns()}"}
    body = {"messages": [{"role": "user", "content": QUESTION}], "sampling": {"temperature": 1.0}}
    first = httpx.post(f"{live.url}/v1/generate", json=body, headers=headers, timeout=60)
    again = httpx.post(f"{live.url}/v1/generate", json=body, headers=headers, timeout=60)
    assert again.json() == first.json()
    assert again.headers["x-idempotent-replay"] == "true" and "x-idempotent-replay" not in first.headers
    other = httpx.post(f"{live.url}/v1/generate", json={**body, "priority": 1}, headers=headers, timeout=60)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_sagemakers_container_contract_is_served(live: LiveGateway) -> None:
    assert httpx.get(f"{live.url}/ping", timeout=60).json()["status"] == "healthy"
    body = {"messages": [{"role": "user", "content": QUESTION}], "sampling": {"temperature": 0}}
    answer = httpx.post(f"{live.url}/invocations", json=body, headers=live.headers, timeout=60)
    assert "Miura" in answer.json()["output_text"]


def test_deep_health_generates_and_asks_for_the_admin_key(live: LiveGateway) -> None:
    assert httpx.get(f"{live.url}/health/deep", timeout=60).status_code == 401
    body = httpx.get(f"{live.url}/health/deep", headers=live.headers, timeout=60).json()
    assert body["status"] == "healthy"
    assert body["backends"]["local"]["output_tokens"] >= 1


def test_metrics_carry_vllms_names_for_the_engine(live: LiveGateway) -> None:
    ask(live)
    text = httpx.get(f"{live.url}/metrics", timeout=60).text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert f"vllm:{name}{{" in text
    assert live.metric("sluice_requests_total") >= 1
    assert live.metric("sluice_log_lines_dropped_total") == 0


def test_vllms_fields_for_the_end_of_an_answer_work_on_the_embedded_engine(live: LiveGateway) -> None:
    def post(path: str, **fields: object) -> httpx.Response:
        return httpx.post(f"{live.url}{path}", json=fields, headers=live.headers, timeout=60)

    turn = {"role": "user", "content": QUESTION}
    greedy = {"model": "demo", "temperature": 0}
    whole = post("/v1/chat/completions", messages=[turn], **greedy).json()
    text = whole["choices"][0]["message"]["content"]
    longer = whole["usage"]["completion_tokens"] + 5
    for fields in ({"min_tokens": longer}, {"ignore_eos": True}):
        asked = post("/v1/chat/completions", messages=[turn], max_tokens=longer, **fields, **greedy).json()
        assert asked["usage"]["completion_tokens"] == longer
        assert asked["choices"][0]["finish_reason"] == "length"

    begun = [turn, {"role": "assistant", "content": text[: len(text) // 2]}]
    ending = {"continue_final_message": True, "add_generation_prompt": False}
    rest = post("/v1/chat/completions", messages=begun, **ending, **greedy).json()
    assert rest["choices"][0]["message"]["content"] and QUESTION not in str(rest["choices"])
    counted = post("/tokenize", messages=begun, **ending).json()
    assert rest["usage"]["prompt_tokens"] == counted["count"]
    closed = post("/tokenize", messages=begun, add_generation_prompt=False).json()
    assert closed["tokens"][: counted["count"]] == counted["tokens"] and closed["count"] > counted["count"]
    both = post(
        "/v1/chat/completions", messages=begun, **(ending | {"add_generation_prompt": True}), **greedy
    )
    assert (both.status_code, both.json()["error"]["param"]) == (400, "add_generation_prompt")
