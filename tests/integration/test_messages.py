"""The official `anthropic` client, unchanged, against a gateway with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.integration.live import ADMIN_KEY, LiveGateway
from tests.message_events import accumulated, check_grammar, parsed

STOCK: Any = [{"role": "user", "content": "Is Berserk in stock?"}]


def tool(name: str, description: str, field: str) -> Any:
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = [
    tool("check_stock", "Look up the stock and price of a series.", "title"),
    tool("order_status", "Look up the status of an order.", "order_id"),
]


@pytest.fixture
def client(live: LiveGateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key=ADMIN_KEY, max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any, *, stream: bool, **fields: Any) -> Any:
    asked: Any = {"model": "demo", "max_tokens": 8_000, "messages": messages, **fields}
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_sequence_inside_a_call_cuts_it_and_no_backend_has_failed(
    client: anthropic.Anthropic, live: LiveGateway, stream: bool
) -> None:
    begins = live.log.stat().st_size
    message = ask(client, STOCK, stream=stream, tools=TOOLS, stop_sequences=["Berserk"])
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    with live.log.open("rb") as log:
        log.seek(begins)
        assert b"attempt failed" not in log.read()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_tools(client: anthropic.Anthropic, stream: bool) -> None:
    messages = list(STOCK)
    first = ask(client, messages, stream=stream, tools=TOOLS)
    [use] = first.content
    assert (first.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "check_stock")
    assert use.input == {"title": "Berserk"} and use.id.startswith("toolu_")
    assert stream or (first._request_id or "").startswith("req_")
    result = json.dumps({"title": "Berserk", "stock": "out of stock", "price": "14.99"})
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": result}]},
    ]
    second = ask(client, messages, stream=stream, tools=TOOLS)
    [block] = second.content
    assert (second.stop_reason, block.type) == ("end_turn", "text")
    assert "out of stock" in block.text or "14.99" in block.text
    assert second.usage.input_tokens > 0


def test_a_stream_and_a_whole_answer_are_the_same(client: anthropic.Anthropic, live: LiveGateway) -> None:
    whole = ask(client, STOCK, stream=False, extra_body={"temperature": 0.0})
    body = {"model": "demo", "max_tokens": 8_000, "messages": STOCK, "temperature": 0.0, "stream": True}
    headers = {"x-api-key": ADMIN_KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "unknown-2099"}
    raw = httpx.post(f"{live.url}/v1/messages?beta=true", json=body, headers=headers, timeout=60)
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = parsed(raw.content)
    check_grammar(events)
    streamed = accumulated(events)
    assert [one.to_dict() for one in streamed.content] == [one.to_dict() for one in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    inputs = [one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (streamed, whole)]
    assert inputs[0] == inputs[1] == events[0]["message"]["usage"]["input_tokens"]


HISTORY: Any = [
    *STOCK,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "check_stock", "input": {"title": "Berserk"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3 left"}]},
]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": STOCK},
        {"messages": STOCK, "system": "Be kind.", "tools": TOOLS},
        {"messages": HISTORY, "tools": TOOLS, "thinking": {"type": "disabled"}},
        {"messages": [*HISTORY, {"role": "system", "content": "Be brief."}]},
    ],
)
def test_counted_tokens_are_the_answers_whole_input(
    client: anthropic.Anthropic, fields: dict[str, Any]
) -> None:
    counted = client.messages.count_tokens(model="demo", **fields).input_tokens
    usage = client.messages.create(model="demo", max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_prompt_that_is_too_long_is_counted(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * 9_000}]
    assert client.messages.count_tokens(model="demo", messages=long).input_tokens > 9_000


def test_a_conversation_that_ends_with_an_answer_is_counted(client: anthropic.Anthropic) -> None:
    def count(messages: Any) -> int:
        return client.messages.count_tokens(model="demo", messages=messages).input_tokens

    ended = [*STOCK, {"role": "assistant", "content": "There are 3."}]
    assert count(STOCK) < count(ended) < count([*ended, {"role": "user", "content": "Thanks."}])
    with pytest.raises(anthropic.BadRequestError, match="cannot be continued"):
        client.messages.create(model="demo", max_tokens=1, messages=ended)


def test_the_client_lists_the_models(client: anthropic.Anthropic) -> None:
    ids = [one.id for one in client.models.list()]
    assert "demo" in ids
    assert client.models.retrieve("demo").max_input_tokens == 4096


def test_an_answer_that_is_cut_says_so(client: anthropic.Anthropic) -> None:
    assert ask(client, STOCK, stream=False, max_tokens=2).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_stop_sequence_that_ended_the_answer_is_named(client: anthropic.Anthropic, stream: bool) -> None:
    greedy = {"temperature": 0.0}
    full = ask(client, STOCK, stream=False, extra_body=greedy).content[0].text
    stop = full.split()[2]
    found = ask(client, STOCK, stream=stream, stop_sequences=["never", stop], extra_body=greedy)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert stop not in found.content[0].text


def test_errors_are_the_clients_own(client: anthropic.Anthropic, live: LiveGateway) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(client, STOCK, stream=False, model="nothing")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as long:
        ask(client, [{"role": "user", "content": "word " * 9_000}], stream=True)
    assert long.value.body["error"]["message"].startswith("prompt is too long: ")  # type: ignore[index]
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        ask(stranger, STOCK, stream=False)
