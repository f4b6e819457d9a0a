"""LiteLLM's SDK over Chat and Messages: a loop of three turns with tools, and its own classes of errors."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.clients.shop_worker import ANSWER, MODEL, RESULTS, TOOLS, vector_of
from tests.integration.live import ADMIN_KEY, LiveGateway

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import fetches a list of prices
litellm = pytest.importorskip("litellm", reason="pip install -e '.[clients]'")


@pytest.fixture(params=["openai", "anthropic"])
def settings(shop: LiveGateway, request: pytest.FixtureRequest) -> dict[str, Any]:
    url = f"{shop.url}/v1" if request.param == "openai" else shop.url
    return {"model": f"{request.param}/{MODEL}", "api_base": url, "api_key": ADMIN_KEY, "max_retries": 0}


def ask(settings: dict[str, Any], messages: list[Any], *, stream: bool) -> Any:
    asked = {**settings, "messages": messages, "tools": TOOLS, "max_tokens": 100}
    if not stream:
        return litellm.completion(**asked)
    return litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)), messages=messages)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_three_turns(settings: dict[str, Any], stream: bool) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Is Berserk there, and where is order 48213?", **mark}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    called = []
    while calls := (message := ask(settings, messages, stream=stream).choices[0].message).tool_calls:
        messages.append(message)
        for call in calls:
            called.append(call.function.name)
            result = RESULTS[call.function.name]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == list(RESULTS)
    assert message.content == ANSWER


def test_errors_have_the_clients_own_classes(settings: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**settings, messages=messages)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**settings, "api_key": "wrong"}, messages=messages)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**settings, "model": f"{settings['model']}-none"}, messages=messages)


def test_embeddings(shop: LiveGateway) -> None:
    texts = ["Berserk", "the sea"]
    found = litellm.embedding(
        model=f"openai/{MODEL}", input=texts, api_base=f"{shop.url}/v1", api_key=ADMIN_KEY, max_retries=0
    )
    assert [one["embedding"] for one in found.data] == [list(vector_of(text)) for text in texts]
