"""The official ``openai`` client, unchanged, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from accounting.batches import BatchStore
from accounting.stored_responses import ResponseStore
from budgeting.values import Plan, SectionCounts
from gateway.batches.batches import Batches
from gateway.batches.files import Files
from gateway.batches.storage import LocalFiles
from gateway.config.batches import BatchesSection
from gateway.config.settings import ServerConfig
from gateway.errors import PublicError
from gateway.requests.stored_responses import StoredResponses
from gateway.testing import ADMIN_KEY, CALLER_KEY, FakeJourney, fake_services, serving

TURNS: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def journey() -> FakeJourney:
    return FakeJourney(pieces=("こん", "にちは", "!"))


@pytest.fixture(scope="module")
def url(journey: FakeJourney) -> Iterator[str]:
    with serving(fake_services(journey, limits=ServerConfig(max_body_bytes=4_194_304))) as base:
        yield base


@pytest.fixture
def client(url: str, journey: FakeJourney) -> Iterator[openai.OpenAI]:
    journey.error = None
    journey.pieces = ("こん", "にちは", "!")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=CALLER_KEY, max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=TURNS, seed=1, user="u", store=False)
    assert answer.choices[0].message.content == "こんにちは!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 640
    assert answer.model_extra is not None
    assert answer.model_extra["sluice"]["backend"] == "embedded"


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="demo", messages=TURNS, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "こんにちは!"
    assert [one.choices[0].finish_reason for one in chunks] == [None, None, None, None, "stop"]
    assert len({one.id for one in chunks}) == 1
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["sluice"]["finish_reason"] == "stop"


def test_a_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=TURNS, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 979
    assert all(one.usage is None for one in chunks[:-1])


def test_a_stream_and_a_whole_answer_name_the_model_and_the_backend_that_answered(
    client: openai.OpenAI, journey: FakeJourney
) -> None:
    journey.plan = Plan((), (1,), SectionCounts(), 4, 0)
    journey.changes = {"model": "manga-v3", "backend_name": "pool"}
    stream = client.chat.completions.create(model="manga", messages=TURNS, stream=True)
    chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"manga-v3"}
    whole = client.chat.completions.create(model="manga", messages=TURNS)
    assert whole.model == "manga-v3"
    for answer in (chunks[-1], whole):
        assert answer.model_extra is not None and answer.model_extra["sluice"]["backend_name"] == "pool"


def test_an_answer_sent_back_as_history(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=TURNS)
    history: Any = [*TURNS, answer.choices[0].message.model_dump(), *TURNS]
    assert client.chat.completions.create(model="demo", messages=history).choices


def test_native_fields_in_the_extra_body(client: openai.OpenAI, journey: FakeJourney) -> None:
    client.chat.completions.create(
        model="demo", messages=TURNS, extra_body={"top_k": 5, "sluice": {"session_id": "s"}}
    )
    assert journey.requests[-1].session_id == "s"
    assert journey.requests[-1].sampling.top_k == 5


def test_a_text_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    assert client.completions.create(model="demo", prompt="x").choices[0].text == "こんにちは!"
    chunks = list(client.completions.create(model="demo", prompt=[1, 2], stream=True))
    assert "".join(one.choices[0].text for one in chunks) == "こんにちは!"


def test_the_models(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["demo", "org/adapter-v1"]
    assert client.models.retrieve("org/adapter-v1").id == "org/adapter-v1"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("nobody")
    assert raised.value.code == "model_not_found"


def test_bad_input(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=TURNS, temperature=9)
    assert raised.value.param == "temperature"
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as raised:
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": 5}}]
        client.chat.completions.create(model="demo", messages=TURNS, tools=tools)
    assert raised.value.param == "tools.0.function.parameters"


def test_a_wrong_key(url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as raised,
    ):
        client.models.list()
    assert raised.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "expected", "raises"),
    [
        (422, "context_too_long", "context_length_exceeded", openai.BadRequestError),
        (403, "forbidden", "forbidden", openai.PermissionDeniedError),
        (404, "unknown_route", "unknown_route", openai.NotFoundError),
        (404, "unknown_model", "model_not_found", openai.NotFoundError),
        (409, "duplicate_request", "duplicate_request", openai.ConflictError),
        (429, "rate_limited", "rate_limit_exceeded", openai.RateLimitError),
        (429, "quota_exceeded", "insufficient_quota", openai.RateLimitError),
        (503, "queue_full", "queue_full", openai.InternalServerError),
        (504, "deadline_exceeded", "deadline_exceeded", openai.InternalServerError),
        (500, "internal", "internal", openai.InternalServerError),
    ],
)
def test_an_early_failure_raises_the_clients_own_class(
    client: openai.OpenAI,
    journey: FakeJourney,
    status: int,
    code: str,
    expected: str,
    raises: type[openai.APIStatusError],
    stream: bool,
) -> None:
    journey.error, journey.pieces = PublicError(status, code, "no"), ()
    with pytest.raises(raises) as raised:
        client.chat.completions.create(model="demo", messages=TURNS, stream=stream)
    assert raised.value.code == expected
    assert raised.value.body["sluice_code"] == code  # type: ignore[index]
    # Every 429 and 503 says when to try again, in whole seconds.
    assert raised.value.response.headers.get("retry-after") == ("1" if status in (429, 503) else None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_message_of_a_too_long_prompt_has_the_words_that_litellm_recognizes(
    client: openai.OpenAI, journey: FakeJourney, stream: bool
) -> None:
    journey.error, journey.pieces = PublicError(422, "context_too_long", "9 tokens"), ()
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=TURNS, stream=stream)
    message = raised.value.body["message"]  # type: ignore[index]
    assert message == "This model's maximum context length is exceeded: 9 tokens"


def test_a_failure_in_mid_stream_raises(client: openai.OpenAI, journey: FakeJourney) -> None:
    journey.error = PublicError(503, "backend_unavailable", "gone")
    text = ""
    with pytest.raises(openai.APIError) as raised:
        for chunk in client.chat.completions.create(model="demo", messages=TURNS, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "こんにちは!"
    assert raised.value.code == "backend_unavailable"


def test_the_client_tries_a_shed_request_again(url: str, journey: FakeJourney) -> None:
    journey.error, journey.pieces = PublicError(503, "queue_full", "no", retry_after_ms=10), ()
    before = len(journey.requests)
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key=ADMIN_KEY, max_retries=1) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(model="demo", messages=TURNS)
    assert len(journey.requests) == before + 2


def test_five_megabytes_are_too_many(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "x" * 5_000_000}]
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(model="demo", messages=turns)
    assert raised.value.status_code == 413
    assert client.models.list().data


def test_every_argument_of_the_official_clients_lists_is_taken(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    url = f"sqlite+aiosqlite:///{tmp_path}/state.db"
    section = BatchesSection(folder=str(tmp_path / "files"))
    files = Files(BatchStore(url, "a"), LocalFiles(tmp_path / "files"), section, lambda: now)
    stored = StoredResponses(ResponseStore(url, tenant_bytes=1 << 20), unix_time=lambda: now)
    services = fake_services(files=files, batches=Batches(files), responses=stored)
    with (
        serving(services) as base,
        openai.OpenAI(
            base_url=f"{base}/v1",
            api_key=CALLER_KEY,
            max_retries=0,
            default_query={"api-version": "2025-04-01"},
        ) as client,
        anthropic.Anthropic(base_url=base, api_key=CALLER_KEY, max_retries=0) as claude,
    ):
        made = [client.files.create(file=("a.txt", b"a"), purpose="evals").id for _ in range(2)]
        page = client.files.list(after=made[0], limit=5, order="asc", purpose="evals")
        assert [one.id for one in page] == made[1:]
        assert list(client.batches.list(limit=5)) == []
        response = client.responses.create(model="demo", input="hi")
        include: Any = ["reasoning.encrypted_content", "message.input_image.image_url"]
        shown = client.responses.retrieve(
            response.id, include=include, include_obfuscation=False, starting_after=0, stream=False
        )
        assert shown.output_text == response.output_text
        items = client.responses.input_items.list(response.id, include=include, limit=5, order="asc")
        assert len(list(items)) == 1
        assert [one.id for one in client.models.list()] == ["demo", "org/adapter-v1"]
        for models in (claude.models, claude.beta.models):
            listed = models.list(
                after_id="demo", lifecycle=["active", "retired"], limit=5, workspace_id="wrkspc_1"
            )
            assert [one.id for one in listed] == ["org/adapter-v1"]
            assert list(models.list(before_id="demo")) == []
            assert models.retrieve("demo").id == "demo"
        with pytest.raises(
            openai.BadRequestError, match=r"colour is not a known field; allowed: purpose, limit"
        ):
            client.files.list(extra_query={"colour": "red"})
        with pytest.raises(
            anthropic.BadRequestError, match=r"colour is not a known field; allowed: .*after_id"
        ):
            claude.models.list(extra_query={"colour": "red"})


def test_a_compacted_conversation_goes_on(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model="demo", input="What should I read?")
    assert compacted.object == "response.compaction"
    assert [one.type for one in compacted.output] == ["message", "compaction"]
    items: Any = [one.model_dump(exclude_none=True, warnings=False) for one in compacted.output]
    answer = client.responses.create(model="demo", input=[*items, {"role": "user", "content": "And then?"}])
    assert answer.output_text == "こんにちは!"
