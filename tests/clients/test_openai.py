"""The official `openai` client: a loop of three turns with tools, and answers of a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.shop_worker import ANSWER, MODEL, RECORD, RESULTS, TOOLS
from tests.integration.live import ADMIN_KEY, LiveGateway


class Record(BaseModel):
    title: str
    copies: int


@pytest.fixture
def client(shop: LiveGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shop.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> Any:
    if not stream:
        return client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as events:
        return events.get_final_completion().choices[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_three_turns(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is Berserk there, and where is order 48213?"}]
    called = []
    while (choice := ask(client, messages, stream=stream)).finish_reason == "tool_calls":
        messages.append(choice.message.to_dict())
        for call in choice.message.tool_calls:
            called.append(call.function.name)
            result = RESULTS[call.function.name]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == list(RESULTS)
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "How many copies of Berserk are there?"}]
    whole = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Record)
    assert whole.choices[0].message.parsed == Record.model_validate(RECORD)
    # The client's own message goes back as it is.
    messages = [*messages, whole.choices[0].message, messages[0]]
    with client.chat.completions.stream(model=MODEL, messages=messages, response_format=Record) as events:
        assert events.get_final_completion().choices[0].message.parsed == Record.model_validate(RECORD)


def respond(client: openai.OpenAI, items: list[Any], *, stream: bool) -> Any:
    flat: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    if not stream:
        return client.responses.create(model=MODEL, input=items, tools=flat)
    with client.responses.stream(model=MODEL, input=items, tools=flat) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_three_turns_of_responses(client: openai.OpenAI, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "Is Berserk there, and where is order 48213?"}]
    called = []
    response = respond(client, items, stream=stream)
    while calls := [one for one in response.output if one.type == "function_call"]:
        items += response.output
        for call in calls:
            called.append(call.name)
            result = RESULTS[call.name]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        response = respond(client, items, stream=stream)
    assert called == list(RESULTS)
    assert (response.status, response.output_text) == ("completed", ANSWER)


def test_a_response_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    asked = "How many copies of Berserk are there?"
    whole = client.responses.parse(model=MODEL, input=asked, text_format=Record)
    assert whole.output_parsed == Record.model_validate(RECORD)
    with client.responses.stream(model=MODEL, input=asked, text_format=Record) as events:
        assert events.get_final_response().output_parsed == Record.model_validate(RECORD)


def test_stored_responses_are_read_followed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hello")
    second = client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert items[0].type == items[-1].type == "message" and len(items) >= 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_background_response_is_polled_and_its_stream_followed(client: openai.OpenAI) -> None:
    begun = client.responses.create(model=MODEL, input="Hello", background=True)
    assert begun.status in ("queued", "in_progress")
    with client.responses.retrieve(begun.id, stream=True) as events:
        seen = list(events)
    assert seen[-1].type == "response.completed"
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    with client.responses.retrieve(begun.id, stream=True, starting_after=2) as events:
        assert [event.sequence_number for event in events] == list(range(3, len(seen)))
    ended = client.responses.retrieve(begun.id)
    assert ended.status == "completed" and ended.output_text
