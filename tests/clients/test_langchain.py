"""LangChain's `ChatOpenAI`: a loop of three turns with tools, and answers of a schema."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.shop_worker import ANSWER, MODEL, RECORD, RESULTS, TOOLS
from tests.integration.live import ADMIN_KEY, LiveGateway

messages = pytest.importorskip("langchain_core.messages", reason="pip install -e '.[clients]'")
openai = pytest.importorskip("langchain_openai", reason="pip install -e '.[clients]'")


class Record(BaseModel):
    title: str
    copies: int


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(shop: LiveGateway, request: pytest.FixtureRequest) -> Any:
    return openai.ChatOpenAI(
        model=MODEL,
        base_url=f"{shop.url}/v1",
        api_key=ADMIN_KEY,
        max_retries=0,
        stream_usage=True,
        use_responses_api=request.param,
    )


def streamed(model: Any, history: list[Any]) -> Any:
    whole = None
    for chunk in model.stream(history):
        whole = chunk if whole is None else whole + chunk
    return whole


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_three_turns(model: Any, stream: bool) -> None:
    bound = model.bind_tools(TOOLS)
    history = [messages.HumanMessage("Is Berserk there, and where is order 48213?")]
    called = []
    while (answer := streamed(bound, history) if stream else bound.invoke(history)).tool_calls:
        history.append(answer)
        for call in answer.tool_calls:
            called.append(call["name"])
            history.append(messages.ToolMessage(RESULTS[call["name"]], tool_call_id=call["id"]))
    assert called == list(RESULTS)
    assert answer.text == ANSWER
    assert answer.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_of_a_schema(model: Any, method: str) -> None:
    found = model.with_structured_output(Record, method=method).invoke(
        "How many copies of Berserk are there?"
    )
    assert found == Record.model_validate(RECORD)
