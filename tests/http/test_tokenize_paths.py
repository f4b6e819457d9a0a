from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from accounting.keys import KeyLimits
from accounting.quotas import Quotas
from budgeting.estimating import EstimatingCounter
from budgeting.learned_counter import LearnedCounter
from gateway.contracts.tokenizing import MAX_IDS
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import BackendUnavailable
from gateway.keys.rate_limits import KeyLimiter
from gateway.prompts.text_threads import TextThreads
from gateway.testing import FakeText, fake_services


@dataclass
class LimitedKeys:
    """One caller with these limits, whatever the key."""

    limits: KeyLimits

    def authenticate(self, bearer: str | None) -> Caller:
        return Caller("acme", CallerRole.CALLER, "key_1", limits=self.limits)


TURN = {"role": "user", "content": "hi"}


async def test_a_text_is_tokenized_with_its_special_tokens(connect: Any) -> None:
    async with connect(fake_services()) as client:
        plain = (await client.post("/tokenize", json={"model": "demo", "prompt": "hi"})).json()
        bare = (await client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})).json()
    assert plain == {"count": 3, "max_model_len": 4096, "tokens": [1, 104, 105], "token_strs": None}
    assert bare["tokens"] == [104, 105]


async def test_token_strings_are_given_when_asked_for(connect: Any) -> None:
    async with connect(fake_services()) as client:
        body = {"prompt": "a", "return_token_strs": True}
        assert (await client.post("/tokenize", json=body)).json()["token_strs"] == ["<1>", "<97>"]


async def test_token_strings_of_a_model_that_only_its_workers_tokenize_are_refused_by_name(
    connect: Any,
) -> None:
    text = FakeText()
    text.tokenizer = LearnedCounter("qwen", EstimatingCounter(), None)
    text.encode_chat = lambda *_, **__: (7, 8)  # type: ignore[method-assign]
    async with connect(fake_services(text=lambda model: text)) as client:
        refused = await client.post("/tokenize", json={"messages": [TURN], "return_token_strs": True})
        counted = await client.post("/tokenize", json={"messages": [TURN]})
    assert (refused.status_code, counted.json()["tokens"]) == (400, [7, 8])
    assert refused.json()["error"]["param"] == "return_token_strs"
    assert "messages" not in refused.json()["error"]["message"]


async def test_messages_are_rendered_with_the_generation_prompt_unless_told_otherwise(connect: Any) -> None:
    async with connect(fake_services()) as client:
        full = (await client.post("/tokenize", json={"messages": [TURN]})).json()
        cut = (
            await client.post("/tokenize", json={"messages": [TURN], "add_generation_prompt": False})
        ).json()
    assert bytes(full["tokens"]).decode() == "user:hi\nassistant:"
    assert bytes(cut["tokens"]).decode() == "user:hi\n"


async def test_token_ids_become_text_again(connect: Any) -> None:
    async with connect(fake_services()) as client:
        response = await client.post("/detokenize", json={"model": "demo", "tokens": [104, 105]})
    assert response.json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [TURN]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": [TURN], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [TURN], "tools": [1]}, "tools.0"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            "/tokenize",
            {"messages": [TURN], "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs.tools",
        ),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_IDS + 1)}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_bad_input_is_400_and_named(connect: Any, path: str, body: Any, param: str) -> None:
    async with connect(fake_services()) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_model_that_is_not_served_is_404(connect: Any) -> None:
    async with connect(fake_services()) as client:
        response = await client.post("/tokenize", json={"model": "nobody", "prompt": "a"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_without_a_tokenizer_the_caller_is_told_so(connect: Any) -> None:
    def loading(model: str) -> Any:
        raise BackendUnavailable("the model is loading", retry_after_ms=100)

    async with connect(fake_services(text=loading)) as client:
        response = await client.post("/tokenize", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


class CountedQuotas(KeyLimiter):
    """Records the requests and tokens that are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.tokens: list[int] = []

    async def enter(self, caller: Caller) -> None:
        self.requests += 1

    async def spend(self, caller: Caller, tokens: int) -> None:
        self.tokens.append(tokens)


async def test_a_request_counts_against_the_keys_limits_by_its_size(connect: Any) -> None:
    limiter = CountedQuotas()
    async with connect(fake_services(limiter=limiter)) as client:
        assert (await client.post("/tokenize", json={"prompt": "a" * 6_400})).is_success
        assert (await client.post("/detokenize", json={"tokens": [97]})).is_success
        assert (await client.post("/tokenize", content=b"{")).status_code == 400
        assert (await client.get("/v1/models")).is_success
    assert limiter.requests == 3
    assert limiter.tokens == [100, 0]


async def test_over_the_keys_tokens_nothing_is_tokenized(connect: Any) -> None:
    limits = KeyLimits(tokens_per_minute=150)
    limiter = KeyLimiter(Quotas(clock=lambda: 1_000.0))
    services = fake_services(limiter=limiter, keys=LimitedKeys(limits))
    async with connect(services) as client:
        first = await client.post("/tokenize", json={"prompt": "a" * 6_400})
        second = await client.post("/tokenize", json={"prompt": "a" * 6_400})
    assert (first.status_code, second.status_code) == (200, 429)
    assert first.headers["x-ratelimit-remaining-tokens"] == "50"
    assert second.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_large_text_is_tokenized_in_the_tenants_share_of_the_threads(connect: Any) -> None:
    services = fake_services()
    taken: list[tuple[str, int]] = []

    class RecordingThreads(TextThreads):
        async def run(self, tenant: str, chars: int, work: Any) -> Any:
            taken.append((tenant, chars))
            return await super().run(tenant, chars, work)

    async with connect(replace(services, text_threads=RecordingThreads())) as client:
        large = await client.post("/tokenize", json={"prompt": "a" * 40_000, "return_token_strs": True})
        await client.post("/tokenize", json={"prompt": "a"})
    answer = large.json()
    assert answer["tokens"] == [1, *[97] * 40_000], "also when it is written in parts"
    assert answer["count"] == len(answer["token_strs"]) == 40_001
    assert [chars > 40_000 for _, chars in taken] == [True]
