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
