"""Pydantic AI: an agent's loop of three turns with tools, and answers of a schema."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.shop_worker import ANSWER, MODEL, RECORD, RESULTS
from tests.integration.live import ADMIN_KEY, LiveGateway

ai = pytest.importorskip("pydantic_ai", reason="pip install -e '.[clients]'")
models = pytest.importorskip("pydantic_ai.models.openai", reason="pip install -e '.[clients]'")
providers = pytest.importorskip("pydantic_ai.providers.openai", reason="pip install -e '.[clients]'")


class Record(BaseModel):
    title: str
    copies: int


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(shop: LiveGateway, request: pytest.FixtureRequest) -> Any:
    provider = providers.OpenAIProvider(base_url=f"{shop.url}/v1", api_key=ADMIN_KEY)
    return getattr(models, request.param)(MODEL, provider=provider)


def agent_of(model: Any, called: list[str]) -> Any:
    def check_stock(title: str) -> str:
        """How many copies of a series there are."""
        called.append("check_stock")
        return RESULTS["check_stock"]

    def order_status(order_id: str) -> str:
        """The status of an order."""
        called.append("order_status")
        return RESULTS["order_status"]

    def ship(order_id: str, express: bool) -> str:
        """Send an order."""
        called.append("ship")
        return RESULTS["ship"]

    return ai.Agent(model, tools=[check_stock, order_status, ship])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_loop_of_three_turns(model: Any, stream: bool) -> None:
    called: list[str] = []
    agent = agent_of(model, called)
    question = "Is Berserk there, and where is order 48213?"
    if stream:
        async with agent.run_stream(question) as run:
            output = await run.get_output()
    else:
        output = (await agent.run(question)).output
    # Calls of one turn run at the same time.
    assert sorted(called) == sorted(RESULTS) and called[-1] == "ship"
    assert output == ANSWER


@pytest.mark.parametrize("native", [False, True], ids=["by a tool", "by response_format"])
async def test_an_answer_of_a_schema(model: Any, native: bool) -> None:
    output = ai.NativeOutput(Record) if native else Record
    done = await ai.Agent(model, output_type=output).run("How many copies of Berserk are there?")
    assert done.output == Record.model_validate(RECORD)
