from __future__ import annotations

from typing import Any

import pytest

from budgeting.values import Plan, SectionCounts
from gateway.config.settings import ServerConfig
from gateway.contracts.answer import BudgetReport, Fallback
from gateway.errors import PublicError
from gateway.testing import ADMIN_KEY, FakeJourney, fake_services
from tests.sse import json_events

TURN = {"role": "user", "content": "hi"}
BODY = {"messages": [TURN]}
CHAT = {"model": "demo", **BODY}
COMPLETION = {"model": "demo", "prompt": "hi"}
BUSY = PublicError(503, "queue_full", "the gateway is busy", retry_after_ms=1_200)


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    return list(json_events(text.split("\n")))


@pytest.mark.parametrize("path", ["/v1/generate", "/invocations"])
async def test_a_native_request_gets_the_documented_answer(connect: Any, path: str) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        response = await client.post(path, json={**BODY, "request_id": "mine"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    trace = response.headers["x-trace-id"]
    assert response.json() == {
        "request_id": "mine",
        "backend": "embedded",
        "backend_version": "demo+none",
        "trace_id": trace,
        "output_text": "Hello, world",
        "finish_reason": "stop",
        "usage": {"input_tokens": 842, "output_tokens": 137, "cached_tokens": 640},
        "timings": {"queue_wait_ms": 3.1, "ttft_ms": 88.0, "total_ms": 912.4},
        "fallback": None,
        "budget": {
            "system": 212,
            "retrieval": 380,
            "recent_turns": 250,
            "older_summary": 0,
            "generation_reserve": 696,
            "dropped_chunks": [],
            "dropped_turns": 0,
        },
        "warnings": [],
    }
    assert response.headers["x-request-id"] == "mine"
    assert journey.requests[0].caller.tenant == "acme"


async def test_a_native_stream_is_token_events_and_one_done(connect: Any) -> None:
    journey = FakeJourney(pieces=("こん", "", "にちは"))
    async with connect(fake_services(journey)) as client:
        response = await client.post("/v1/generate", json={**BODY, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    got = events(response.text)
    assert [one["type"] for one in got] == ["token", "token", "done"]
    assert "こん" in response.text
    assert got[-1]["trace_id"] == response.headers["x-trace-id"]
    assert "output_text" not in got[-1]


async def test_a_fallbacks_answer_is_still_200_and_says_so(connect: Any) -> None:
    changes = {"backend": "degraded", "fallback": Fallback("degraded_response", "queue_full", 900)}
    async with connect(fake_services(FakeJourney(changes=changes))) as client:
        response = await client.post("/v1/generate", json=BODY)
    assert response.status_code == 200
    assert response.json()["fallback"] == {
        "kind": "degraded_response",
        "reason": "queue_full",
        "retry_after_ms": 900,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/generate", BODY), ("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)],
)
async def test_a_failure_before_the_first_event_has_its_own_status(
    connect: Any, path: str, body: Any, stream: bool
) -> None:
    async with connect(fake_services(FakeJourney(pieces=(), error=BUSY))) as client:
        response = await client.post(path, json={**body, "stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["code"] == "queue_full"


async def test_a_failure_after_the_first_event_is_an_event(connect: Any) -> None:
    async with connect(fake_services(FakeJourney(error=BUSY))) as client:
        native = await client.post("/v1/generate", json={**BODY, "stream": True})
        openai = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert native.status_code == 200
    last = events(native.text)[-1]
    assert (last["type"], last["partial"], last["error"]["code"]) == ("error", True, "queue_full")
    assert openai.status_code == 200
    assert events(openai.text)[-1]["error"]["type"] == "service_unavailable_error"
    assert "[DONE]" not in openai.text


async def test_the_whole_chat_completion_has_openais_shape(connect: Any) -> None:
    async with connect(fake_services()) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    body = response.json()
    sluice = body.pop("sluice")
    assert body == {
        "id": "chatcmpl-gen_2",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 842,
            "completion_tokens": 137,
            "total_tokens": 979,
            "prompt_tokens_details": {"cached_tokens": 640},
        },
    }
    assert sluice["backend"] == "embedded"
    assert sluice["request_id"] == response.headers["x-request-id"]
    assert sluice["trace_id"] == response.headers["x-trace-id"]
    assert "x-sluice-trimmed" not in response.headers


async def test_a_trimmed_prompt_is_told_in_a_header_of_openais_contract(connect: Any) -> None:
    budget = BudgetReport(1, 2, 3, 0, 4, dropped_chunks=("shop secret",), dropped_turns=2)
    async with connect(fake_services(FakeJourney(changes={"budget": budget}))) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.headers["x-sluice-trimmed"] == "turns=2, chunks=1"
    assert response.json()["sluice"]["budget"]["dropped_chunks"] == ["shop secret"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/generate"])
async def test_a_header_of_an_openai_stream_says_what_was_trimmed_from_the_prompt(
    connect: Any, path: str
) -> None:
    counts = SectionCounts(0, 0, 3, 0)
    plan = Plan((), (1, 2, 3), counts, 4, 0, dropped_chunks=("shop secret",), dropped_turns=2)
    body = COMPLETION if path == "/v1/completions" else BODY if path == "/v1/generate" else CHAT
    async with connect(fake_services(FakeJourney(plan=plan))) as client:
        response = await client.post(path, json={**body, "stream": True})
    trimmed = None if path == "/v1/generate" else "turns=2, chunks=1"
    assert response.status_code == 200
    assert response.headers.get("x-sluice-trimmed") == trimmed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "expected"),
    [
        ("/v1/generate", {}, "max_tokens", "sampling.max_tokens"),
        ("/v1/generate", {}, "route", "route"),
        ("/v1/chat/completions", {}, "max_tokens", "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ("/v1/chat/completions", {"guided_regex": "a"}, "response_format", "guided_regex"),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"json": {}}},
            "response_format",
            "structured_outputs.json",
        ),
        ("/v1/chat/completions", {"sluice": {"route": "r"}}, "route", "sluice.route"),
        ("/v1/chat/completions", {"sluice": {"adapter_id": "a"}}, "adapter_id", "sluice.adapter_id"),
        ("/v1/chat/completions", {"model": "an-adapter"}, "adapter_id", "model"),
        ("/v1/completions", {}, "messages", "prompt"),
    ],
)
async def test_a_refusal_of_the_journey_names_the_field_as_the_body_spells_it(
    connect: Any, path: str, fields: dict[str, Any], param: str, expected: str, stream: bool
) -> None:
    error = PublicError(422, "invalid_request", f"{param} is 9; allowed: 8", param)
    body = {**(COMPLETION if path == "/v1/completions" else BODY if "generate" in path else CHAT), **fields}
    async with connect(fake_services(FakeJourney(pieces=(), error=error))) as client:
        response = await client.post(path, json={**body, "stream": stream})
    assert response.status_code in (400, 422)
    found = response.json()["error"]
    assert (found["param"], found["message"]) == (expected, f"{expected} is 9; allowed: 8")


async def test_an_unknown_field_next_to_sampling_is_not_taken_for_a_field_of_sampling(connect: Any) -> None:
    async with connect(fake_services()) as client:
        response = await client.post("/v1/generate", json={**BODY, "temperature": 1})
    assert response.json()["error"]["param"] == "temperature"


async def test_the_whole_text_completion_has_openais_shape(connect: Any) -> None:
    async with connect(fake_services()) as client:
        body = (await client.post("/v1/completions", json=COMPLETION)).json()
    assert body["id"].startswith("cmpl-gen_")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


@pytest.mark.parametrize(
    ("preference", "allowed"),
    [
        ("sluice-no-fallback", False),
        ("respond-async, Sluice-No-Fallback", False),
        ("sluice-no-fallback; why=test ,wait=3", False),
        ("wait; for=sluice-no-fallback", True),
        ("respond-async", True),
        (None, True),
    ],
)
async def test_the_caller_may_prefer_an_error_to_a_fallback(
    connect: Any, preference: str | None, allowed: bool
) -> None:
    journey = FakeJourney()
    headers = {} if preference is None else {"prefer": preference}
    async with connect(fake_services(journey)) as client:
        await client.post("/v1/generate", json=BODY, headers=headers)
    assert journey.requests[0].allow_fallback is allowed


async def test_the_priority_is_capped_by_the_key(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey)) as client:
        await client.post("/v1/generate", json={**BODY, "priority": 1})
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        await client.post("/v1/generate", json={**BODY, "priority": 1}, headers=headers)
    assert [one.priority for one in journey.requests] == [0, 1]


async def test_a_deadline_counts_from_arrival_and_the_request_timeout_sets_none(connect: Any) -> None:
    journey = FakeJourney()
    async with connect(fake_services(journey, clock=lambda: 50.0)) as client:
        await client.post("/v1/generate", json={**BODY, "deadline_ms": 2_500})
        await client.post("/v1/generate", json=BODY)
    assert [one.deadline for one in journey.requests] == [52.5, None]


async def test_a_defect_of_the_journey_is_internal_and_tells_nothing(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    journey = FakeJourney(pieces=(), defect=RuntimeError("the caller's private words"))
    async with connect(fake_services(journey)) as client:
        response = await client.post("/v1/generate", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "private" not in response.text
    assert "RuntimeError" in caplog.text
    assert "private" not in caplog.text


async def test_a_defect_in_mid_stream_ends_the_stream_with_an_error(connect: Any) -> None:
    async with connect(fake_services(FakeJourney(defect=RuntimeError()))) as client:
        response = await client.post("/v1/generate", json={**BODY, "stream": True})
    assert events(response.text)[-1]["error"]["code"] == "internal"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_journey_without_an_end_is_a_defect(connect: Any, stream: bool) -> None:
    async with connect(fake_services(FakeJourney(pieces=(), silent=True))) as client:
        response = await client.post("/v1/generate", json={**BODY, "stream": stream})
    assert response.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_cancelled_and_told(connect: Any, stream: bool) -> None:
    journey = FakeJourney(pieces=(), holds=True)
    services = fake_services(journey, limits=ServerConfig(request_timeout_seconds=0.5))
    async with connect(services) as client:
        response = await client.post("/v1/generate", json={**BODY, "stream": stream})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert (journey.cancelled, journey.running) == (1, 0)
