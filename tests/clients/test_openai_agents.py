"""OpenAI's Agents SDK over Chat Completions and Responses: an agent's loop of three turns with tools."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from tests.clients.shop_worker import ANSWER, MODEL, RESULTS
from tests.integration.live import ADMIN_KEY, LiveGateway

agents = pytest.importorskip("agents", reason="pip install -e '.[clients]'")


@pytest.mark.parametrize("contract", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_loop_of_three_turns(shop: LiveGateway, stream: bool, contract: str) -> None:
    called: list[str] = []

    @agents.function_tool
    def check_stock(title: str) -> str:
        """How many copies of a series there are."""
        called.append("check_stock")
        return RESULTS["check_stock"]

    @agents.function_tool
    def order_status(order_id: str) -> str:
        """The status of an order."""
        called.append("order_status")
        return RESULTS["order_status"]

    @agents.function_tool
    def ship(order_id: str, express: bool) -> str:
        """Send an order."""
        called.append("ship")
        return RESULTS["ship"]

    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{shop.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        agent = agents.Agent(
            name="shop",
            instructions="You sell manga.",
            model=getattr(agents, contract)(model=MODEL, openai_client=client),
            tools=[check_stock, order_status, ship],
        )
        question = "Is Berserk there, and where is order 48213?"
        if stream:
            run = agents.Runner.run_streamed(agent, question)
            async for _ in run.stream_events():
                pass
        else:
            run = await agents.Runner.run(agent, question)
    assert sorted(called) == sorted(RESULTS) and called[-1] == "ship"
    assert run.final_output == ANSWER
