"""Anthropic's paths: pings, models, probes, and headers of agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from budgeting.values import Plan, SectionCounts
from gateway.contracts.events import Delta
from gateway.contracts.model_card import ModelCard
from gateway.contracts.values import GenerateRequest
from gateway.errors import PublicError
from gateway.generation.sink import Sink
from gateway.testing import ADMIN_KEY, FakeJourney, answer_for, fake_services
from tests.http.fakes import FakePrompts
from tests.message_events import check_grammar, parsed
from tests.virtual_time import in_virtual_time

ASKED = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
NO_KEY = {"authorization": ""}
PLAN = Plan((), tuple(range(8)), SectionCounts(recent_turns=8), 8, 0)
BUSY = PublicError(503, "queue_full", "the gateway is busy", retry_after_ms=1_200)


class SlowJourney(FakeJourney):
    """Is silent for the seconds of ``waits`` before each piece, and before the end."""

    def __init__(self, *waits: float, error: PublicError | None = None) -> None:
        super().__init__(error=error)
        self._waits = waits

    async def _run(self, request: GenerateRequest, sink: Sink) -> None:
        for number, wait in enumerate(self._waits):
            await asyncio.sleep(wait)
            if number < len(self._waits) - 1:
                await sink.delta(Delta(f"{number} ", 1))
        if self.error is not None:
            await sink.fail(self.error)
        else:
            await sink.finish(answer_for(request, "0 1 "))


def streamed(connect: Any, journey: FakeJourney) -> tuple[int, list[dict[str, Any]]]:
    """Status and events of a stream whose time is virtual."""

    async def scenario() -> tuple[int, bytes]:
        async with connect(fake_services(journey)) as client:
            response = await client.post("/v1/messages", json={**ASKED, "stream": True})
        return response.status_code, response.content

    status, content = in_virtual_time(scenario())
    return status, parsed(content)


@pytest.mark.parametrize(
    ("waits", "pings"),
    [((0.1, 9.9, 0.1), 0), ((16, 0.1, 0.1), 1), ((0.1, 31, 0.1), 2), ((0.1, 0.1, 16), 1), ((16, 16, 16), 3)],
)
def test_a_silent_stream_gets_a_ping_after_ten_to_fifteen_seconds(
    connect: Any, waits: tuple[float, ...], pings: int
) -> None:
    status, events = streamed(connect, SlowJourney(*waits))
    assert status == 200
    assert events[0]["type"] == "message_start"
    assert events.count({"type": "ping"}) == pings
    check_grammar(events)


async def test_a_stream_opens_with_the_part_of_the_prompt_that_was_cached(connect: Any) -> None:
    class Cached(FakeJourney):
        async def _run(self, request: GenerateRequest, sink: Sink) -> None:
            answer = answer_for(request, " Hello")
            sink.planned(PLAN, "demo")
            await sink.delta(Delta(" ", 1, cached_tokens=6))
            await sink.delta(Delta("Hello", 1))
            await sink.finish(answer)

    async with connect(fake_services(Cached())) as client:
        response = await client.post("/v1/messages", json={**ASKED, "stream": True})
    start, block, *_ = parsed(response.content)
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 6)
    assert start["message"]["model"] == "demo"
    assert block["type"] == "content_block_start"
    assert (
        "".join(one["delta"].get("text", "") for one in parsed(response.content) if "delta" in one)
        == " Hello"
    )


def test_what_fails_after_a_ping_is_an_event(connect: Any) -> None:
    status, events = streamed(connect, SlowJourney(16, error=BUSY))
    assert status == 200
    assert [one["type"] for one in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"]["type"] == "overloaded_error"


async def test_a_failure_before_the_first_event_is_a_status_with_retry_after(connect: Any) -> None:
    async with connect(fake_services(FakeJourney(pieces=(), error=BUSY))) as client:
        for stream in (False, True):
            response = await client.post("/v1/messages?beta=true", json={**ASKED, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (529, "2")
            assert response.json()["error"]["type"] == "overloaded_error"
            assert response.json()["request_id"] == response.headers["x-request-id"]


async def test_a_thread_is_refused_so_that_a_tool_runner_sends_the_whole_conversation(connect: Any) -> None:
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    async with connect(fake_services()) as client:
        refused = await client.post("/v1/messages", json={**ASKED, "thread": thread})
        assert (await client.post("/v1/messages", json={**ASKED, "thread": None})).status_code == 200
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thread")
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_the_frameworks_refusals_have_anthropics_shape_too(connect: Any) -> None:
    async with connect(fake_services()) as client:
        wrong = await client.get("/v1/messages")
        missing = await client.post("/v1/messages/count_tokens", json={"model": "demo"})
        stranger = await client.post("/v1/messages/count_tokens", json=ASKED, headers=NO_KEY)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "messages")
    assert (stranger.status_code, stranger.json()["error"]["type"]) == (401, "authentication_error")


async def test_tokens_are_counted_by_what_would_be_sent(connect: Any) -> None:
    prompts: Any = FakePrompts()
    async with connect(fake_services(prompts=prompts)) as client:
        response = await client.post("/v1/messages/count_tokens", json={**ASKED, "system": "four"})
    assert response.json() == {"input_tokens": 6}


@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_clients_probe_without_a_key(connect: Any, path: str) -> None:
    async with connect(fake_services()) as client:
        found = await client.head(path, headers=NO_KEY)
    assert (found.status_code, found.content) == (200, b"")


async def test_models_have_anthropics_shape_to_its_clients(connect: Any) -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with connect(fake_services()) as client:
        plain = (await client.get("/v1/models")).json()
        found = (await client.get("/v1/models?limit=1000", headers=version)).json()
        one = (await client.get("/v1/models/org/adapter-v1", headers=version)).json()
    ids = [card["id"] for card in plain["data"]]
    assert [card["id"] for card in found["data"]] == ids
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, ids[0], ids[-1])
    assert one in found["data"]
    assert (one["type"], one["display_name"], one["lifecycle"]) == ("model", "org/adapter-v1", "active")


@pytest.mark.parametrize("query", ["limit=1000", "after_id=demo", "before_id=demo", "lifecycle[]=active"])
async def test_a_parameter_of_anthropics_list_asks_for_that_list_without_a_header(
    connect: Any, query: str
) -> None:
    """Claude Code asks for ``/v1/models?limit=1000``; OpenAI's list has no pages."""
    async with connect(fake_services()) as client:
        found = await client.get(f"/v1/models?{query}")
        same = await client.get(f"/v1/models?{query}", headers={"anthropic-version": "2023-06-01"})
    assert (found.status_code, found.json()) == (200, same.json())


async def test_anthropics_list_of_models_comes_in_pages(connect: Any) -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with connect(fake_services()) as client:
        ids = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert len(ids) > 1
        for query, expected, more in (
            ("limit=1", ids[:1], True),
            (f"limit=1&after_id={ids[-2]}", ids[-1:], False),
            (f"after_id={ids[0]}", ids[1:], False),
            (f"after_id={ids[-1]}", [], False),
            (f"limit=1&before_id={ids[1]}", ids[:1], False),
            (f"before_id={ids[-1]}", ids[:-1], False),
            ("lifecycle[]=active&lifecycle[]=retired", ids, False),
            ("lifecycle[]=deprecated", [], False),
        ):
            page = (await client.get(f"/v1/models?{query}", headers=version)).json()
            assert [one["id"] for one in page["data"]] == expected, query
            assert page["has_more"] is more, query
            assert (page["first_id"], page["last_id"]) == (
                (expected[0], expected[-1]) if expected else (None, None)
            )


async def test_errors_of_the_models_have_anthropics_shape_to_its_clients(connect: Any) -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with connect(fake_services()) as client:
        for path, key, status, kind, param in (
            ("?limit=0", {}, 400, "invalid_request_error", "limit"),
            ("?limit=a", {}, 400, "invalid_request_error", "limit"),
            ("?page=2", {}, 400, "invalid_request_error", "page"),
            ("?lifecycle[]=new", {}, 400, "invalid_request_error", "lifecycle[].0"),
            ("?after_id=nobody", {}, 400, "invalid_request_error", "after_id"),
            ("?before_id=demo&after_id=demo", {}, 400, "invalid_request_error", "before_id"),
            ("/nobody", {}, 404, "not_found_error", "model"),
            ("", NO_KEY, 401, "authentication_error", None),
        ):
            refused = await client.get(f"/v1/models{path}", headers={**version, **key})
            body = refused.json()
            assert (refused.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), body
            assert body["error"]["param"] == param
            if param == "limit":
                value, allowed = path[-1], "1 or more" if path[-1] == "0" else "an integer"
                assert body["error"]["message"] == f"limit is '{value}'; allowed: {allowed}"
            assert body["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
        plain = await client.get("/v1/models/nobody")
    assert plain.json()["error"]["code"] == "model_not_found" and "request-id" not in plain.headers


async def test_codex_finds_the_fields_that_its_reader_demands(connect: Any) -> None:
    async with connect(fake_services()) as client:
        answer = await client.get("/v1/models?client_version=0.169.0")
        again = await client.get("/v1/models?client_version=0.169.0")
    async with connect(fake_services(models=lambda caller: ())) as client:
        other = await client.get("/v1/models?client_version=0.169.0")
    assert answer.headers["etag"] == answer.headers["x-models-etag"] == again.headers["etag"]
    assert other.headers["etag"] != answer.headers["etag"]
    found = answer.json()
    assert [one["slug"] for one in found["models"]] == [card["id"] for card in found["data"]]
    first = found["models"][0]
    assert {
        "slug", "display_name", "description", "supported_reasoning_levels", "shell_type", "visibility",
        "supported_in_api", "priority", "upgrade", "base_instructions", "supports_reasoning_summaries",
        "support_verbosity", "default_verbosity", "apply_patch_tool_type", "truncation_policy",
        "supports_parallel_tool_calls", "experimental_supported_tools", "default_reasoning_level",
        "auto_compact_token_limit",
    } <= set(first)  # fmt: skip
    assert first["base_instructions"]
    assert (first["context_window"], first["truncation_policy"]) == (4096, {"mode": "tokens", "limit": 512})


async def test_codex_finds_whether_a_model_takes_images(connect: Any) -> None:
    cards = (ModelCard("demo", "demo"), ModelCard("sees", "sees", images=True))
    async with connect(fake_services(models=lambda caller: cards)) as client:
        found = (await client.get("/v1/models?client_version=0.169.0")).json()["models"]
    assert [one["input_modalities"] for one in found] == [["text"], ["text", "image"]]


@pytest.mark.parametrize(
    ("headers", "session", "priority"),
    [
        ({}, "u", 0),
        ({"x-claude-code-session-id": "s-1"}, "s-1", 0),
        ({"x-claude-code-session-id": " "}, "u", 0),
        ({"x-claude-code-session-id": "x" * 257}, "u", 0),
        ({"x-claude-code-request-class": "main"}, "u", 0),
        ({"x-claude-code-request-class": "auxiliary"}, "u", -1),
        ({"x-claude-code-request-class": "new"}, "u", 0),
    ],
)
async def test_an_agents_headers_are_session_and_priority(
    connect: Any, headers: dict[str, str], session: str, priority: int
) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        answer = await client.post(
            "/v1/messages",
            json={**ASKED, "metadata": {"user_id": "u"}},
            headers={"x-api-key": ADMIN_KEY, "authorization": "", **headers},
        )
    assert answer.status_code == 200
    [request] = journey.requests
    assert (request.session_id, request.priority) == (session, priority)
    assert request.user == "u"
