"""An agent of LangGraph with LangChain's `ChatAnthropic`: a loop of three turns, and answers of a schema."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.shop_worker import ANSWER, MODEL, RECORD, RESULTS
from tests.integration.live import ADMIN_KEY, LiveGateway

anthropic = pytest.importorskip("langchain_anthropic", reason="pip install -e '.[clients]'")
agents = pytest.importorskip("langgraph.prebuilt", reason="pip install -e '.[clients]'")


class Record(BaseModel):
    title: str
    copies: int


def check_stock(title: str) -> str:
    """How many copies of a series there are."""
    return RESULTS["check_stock"]


def order_status(order_id: str) -> str:
    """The status of an order."""
    return RESULTS["order_status"]


def ship(order_id: str, express: bool) -> str:
    """Send an order."""
    return RESULTS["ship"]


@pytest.fixture
def model(shop: LiveGateway) -> Any:
    return anthropic.ChatAnthropic(
        model=MODEL, base_url=shop.url, api_key=ADMIN_KEY, max_retries=0, max_tokens=100
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.filterwarnings("ignore:create_react_agent")
def test_a_loop_of_three_turns(model: Any, stream: bool) -> None:
    agent = agents.create_react_agent(model, [check_stock, order_status, ship])
    asked = {"messages": [("user", "Is Berserk there, and where is order 48213?")]}
    if stream:
        chunks = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
        assert "".join(one.text for one in chunks if one.type == "AIMessageChunk") == ANSWER
        # The results of one turn's calls come in the order in which the agent's threads end.
        assert sorted(one.name for one in chunks if one.type == "tool") == sorted(RESULTS)
    else:
        messages = agent.invoke(asked)["messages"]
        assert messages[-1].text == ANSWER
        assert [one.name for one in messages if one.type == "tool"] == list(RESULTS)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_of_a_schema(model: Any, method: str) -> None:
    found = model.with_structured_output(Record, method=method).invoke(
        "How many copies of Berserk are there?"
    )
    assert found == Record.model_validate(RECORD)
