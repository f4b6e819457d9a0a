"""``dialect: auto``: what a worker is, found out before its first request."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from gateway.backends.port import Continue, PartialAnswer
from gateway.contracts.features import Feature
from resilience.failures import BackendFailure
from tests.conformance.harness import collect
from tests.workers.raw_worker import RawWorker, answers, pool, state_of, until, work

GOOD = answers("Hello", " there")


def models(owner: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": "base", "owned_by": owner}]}).encode()


def worker_of(owner: str | None) -> RawWorker:
    return RawWorker([GOOD], models=None if owner is None else lambda: models(owner))


async def test_a_worker_that_says_it_is_a_sluice_gets_nothing_of_vllms_in_its_first_request() -> None:
    worker = worker_of("sluice")
    async with pool(worker) as backend:
        assert (await collect(backend, work(cache_salt="acme"))).text == "Hello there"
        assert backend.continues == frozenset()
    (request,) = worker.requests
    assert not {"cache_salt", "return_token_ids", "stream_interval"} & set(request.body)
    assert request.body["stream_options"] == {"include_usage": True}
    assert request.headers["prefer"] == "sluice-no-fallback"
    assert request.path.endswith("/chat/completions")


def of_bytes(text: str) -> list[int]:
    """The tokenizer of the pool's gateway: ids are bytes."""
    return list(text.encode())


def another_way(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


async def test_a_sluice_of_the_same_tokenizer_gets_token_ids_and_is_asked_for_its_own() -> None:
    worker = RawWorker([GOOD], models=lambda: models("sluice"), tokenize=of_bytes)
    async with pool(worker) as backend:
        assert (await collect(backend, work(ids=[5, 6]))).text == "Hello there"
        assert backend.continues == {Continue.TOKENS}
        await collect(backend, work(ids=[5, 6], partial=PartialAnswer("ab", (97, 98))))
    first, second = worker.requests
    assert first.path.endswith("/v1/completions") and first.body["prompt"] == [5, 6]
    assert first.body["sluice"] == {"token_ids": True}
    assert second.body["prompt"] == [5, 6, 97, 98]


async def test_a_worker_behind_a_path_is_probed_and_asked_for_tokens_below_it() -> None:
    worker = RawWorker([GOOD], models=lambda: models("vllm"), tokenize=of_bytes, prefix="/team")
    async with pool(worker, prompt="auto") as backend:
        await collect(backend, work(ids=[5, 6]))
        assert worker.requests[0].path == "/team/v1/completions", "token ids: the tokenizers agree"
        worker.healthy = False
        await until(lambda: state_of(backend)[0].state != "in_service")


@pytest.mark.parametrize(
    ("tokenize", "prompt"), [(another_way, "auto"), (None, "auto"), (of_bytes, "messages")]
)
async def test_messages_go_to_a_sluice_of_another_tokenizer_and_where_they_are_configured(
    tokenize: Callable[[str], list[int]] | None, prompt: str
) -> None:
    worker = RawWorker([GOOD], models=lambda: models("sluice"), tokenize=tokenize)
    async with pool(worker, prompt=prompt) as backend:
        await collect(backend, work())
        assert backend.continues == frozenset()
    assert worker.requests[0].path.endswith("/chat/completions")


async def test_one_sluice_with_another_tokenizer_makes_the_pool_send_messages() -> None:
    same = RawWorker([GOOD], models=lambda: models("sluice"), tokenize=of_bytes)
    other = RawWorker([GOOD], models=lambda: models("sluice"), tokenize=another_way)
    async with pool(same, other) as backend:
        await collect(backend, work())
    (request,) = same.requests + other.requests
    assert request.path.endswith("/chat/completions")


async def test_log_probabilities_are_asked_of_a_sluice_in_a_chat_which_has_their_bytes() -> None:
    worker = RawWorker([GOOD], models=lambda: models("sluice"), tokenize=of_bytes)
    async with pool(worker) as backend:
        await collect(backend, work(sampling={"logprobs": 1}))
    assert worker.requests[0].path.endswith("/chat/completions")


@pytest.mark.parametrize("owner", ["vllm", "ollama", None])
async def test_any_other_worker_gets_vllms_extensions(owner: str | None) -> None:
    worker = worker_of(owner)
    async with pool(worker) as backend:
        await collect(backend, work(cache_salt="acme"))
    assert {"cache_salt", "return_token_ids"} <= set(worker.requests[0].body)


@pytest.mark.parametrize(
    ("owners", "dialect", "resumes"),
    [
        (["vllm", "sglang"], "auto", True),
        (["vllm", "ollama"], "auto", False),
        ([None], "auto", False),
        (["ollama"], "vllm", True),
    ],
)
async def test_an_answer_is_resumed_by_its_text_where_each_worker_is_known_to_complete_a_message(
    owners: list[str | None], dialect: str, resumes: bool
) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "a"}}]}
    async with pool(*map(worker_of, owners), dialect=dialect) as backend:
        assert backend.continues == ({Continue.TEXT} if resumes else set())
        resumed = collect(backend, work(extra=tools, partial=PartialAnswer("ab", None)))
        with nullcontext() if resumes else pytest.raises(BackendFailure):
            await resumed


async def test_a_sluice_is_probed_where_it_says_whether_it_can_answer() -> None:
    worker = worker_of("sluice")
    async with pool(worker) as backend:
        seen = worker.probes
        assert seen >= 1
        worker.healthy = False
        await until(lambda: state_of(backend)[0].state == "ejected")
        worker.healthy = True
        await until(lambda: state_of(backend)[0].state == "in_service")
        assert worker.probes == seen


async def test_a_configured_dialect_holds_whatever_the_worker_says() -> None:
    worker = worker_of("sluice")
    async with pool(worker, dialect="vllm") as backend:
        await collect(backend, work(cache_salt="acme"))
    assert "cache_salt" in worker.requests[0].body
    assert "prefer" not in worker.requests[0].headers


@pytest.mark.parametrize("dialect", ["auto", "vllm"])
async def test_a_vllm_of_the_same_tokenizer_and_template_gets_token_ids(dialect: str) -> None:
    worker = RawWorker([GOOD], models=lambda: models("vllm"), tokenize=of_bytes)
    async with pool(worker, dialect=dialect) as backend:
        assert (await collect(backend, work(ids=[5, 6], cache_salt="acme"))).text == "Hello there"
        assert backend.continues == {Continue.TOKENS, Continue.CHATS}
    (request,) = worker.requests
    assert request.path.endswith("/v1/completions") and request.body["prompt"] == [5, 6]
    assert {"cache_salt", "return_token_ids"} <= set(request.body)


def with_a_default_system_message(text: str) -> list[int]:
    """The gateway's ids, but for a template that adds something to conversations without instructions."""
    return of_bytes(text if text.startswith("Answer") else f"Be kind.{text}")


@pytest.mark.parametrize(
    ("tokenize", "changes"),
    [
        (another_way, {}),
        (with_a_default_system_message, {}),
        (None, {}),
        (of_bytes, {"prompt": "messages"}),
        (of_bytes, {"reasons": True}),
        (of_bytes, {"dialect": "openai"}),
    ],
    ids=["tokenizer", "template", "no tokenizer", "configured", "reasoning parser", "dialect"],
)
async def test_a_vllm_gets_messages_where_ids_might_mean_another_prompt_or_go_around_its_parser(
    tokenize: Callable[[str], list[int]] | None, changes: dict[str, Any]
) -> None:
    worker = RawWorker([GOOD], models=lambda: models("vllm"), tokenize=tokenize)
    async with pool(worker, **changes) as backend:
        await collect(backend, work(cache_salt=None))
        assert Continue.TOKENS not in backend.continues
    assert worker.requests[0].path.endswith("/chat/completions")


async def test_a_request_with_fields_of_the_worker_goes_as_messages_to_a_vllm_and_is_resumed_so() -> None:
    worker = RawWorker([GOOD], models=lambda: models("vllm"), tokenize=of_bytes)
    tools = {"tools": [{"type": "function"}]}
    async with pool(worker) as backend:
        await collect(backend, work(extra=tools))
        await collect(backend, work(extra=tools, partial=PartialAnswer("ab", (97, 98))))
    first, second = worker.requests
    assert first.path.endswith("/chat/completions") and first.body["tools"] == tools["tools"]
    assert second.path.endswith("/chat/completions") and second.body["continue_final_message"]
    assert second.body["messages"][-1] == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    ("owner", "dialect", "takes"),
    [
        ("vllm", "auto", True),
        ("sglang", "auto", True),
        ("sluice", "auto", True),
        ("llama-cpp-python", "auto", False),
        ("llama-cpp-python", "vllm", True),
    ],
)
async def test_a_message_to_continue_goes_to_no_server_that_is_known_to_begin_another(
    owner: str, dialect: str, takes: bool
) -> None:
    async with pool(worker_of(owner), dialect=dialect) as backend:
        assert (Feature.CONTINUE_FINAL_MESSAGE in backend.features) is takes


@pytest.mark.parametrize("owner", ["vllm", "sluice"])
async def test_a_worker_that_comes_back_with_another_tokenizer_gets_messages_and_ids_once_it_has_ours(
    owner: str,
) -> None:
    worker = RawWorker([GOOD], models=lambda: models(owner), tokenize=of_bytes)

    async def restarted(tokenize: Callable[[str], list[int]]) -> str:
        worker.healthy = False
        await until(lambda: state_of(backend)[0].state == "ejected")
        worker.tokenize = tokenize
        worker.healthy = True
        await until(lambda: state_of(backend)[0].state == "in_service")
        await collect(backend, work())
        return worker.requests[-1].path

    async with pool(worker) as backend:
        await collect(backend, work())
        assert worker.requests[-1].path.endswith("/v1/completions")
        assert (await restarted(another_way)).endswith("/chat/completions")
        assert (await restarted(of_bytes)).endswith("/v1/completions")
