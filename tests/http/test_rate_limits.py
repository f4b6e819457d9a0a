"""Rate limits of keys over HTTP: requests are counted and refused, and answers report what is left."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import websockets

from accounting.keys import KeyLimits
from accounting.quotas import Quotas
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import PublicError, QuotaExceeded, RateLimited
from gateway.keys.rate_limits import KeyLimiter
from gateway.ports import Services
from gateway.testing import FakeJourney, fake_services, serving
from tests.http.conftest import Connect

NATIVE = {"messages": [{"role": "user", "content": "Hi."}]}
CHAT = {"model": "demo", **NATIVE}
LIMITED = Caller(
    "acme", CallerRole.CALLER, "key_1", limits=KeyLimits(requests_per_minute=2, tokens_per_day=9_000)
)


class OneKey:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def authenticate(self, bearer: str | None) -> Caller:
        return self._caller


def services(caller: Caller = LIMITED, journey: FakeJourney | None = None) -> Services:
    limiter = KeyLimiter(Quotas(clock=lambda: 100.0))
    return fake_services(journey or FakeJourney(), keys=OneKey(caller), limiter=limiter)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", NATIVE),
        ("/v1/chat/completions", CHAT),
        ("/invocations", NATIVE),
        ("/v1/generate", {**NATIVE, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
async def test_a_request_over_the_limit_is_429_and_every_answer_has_the_rate_limit_headers(
    connect: Connect, path: str, body: dict[str, object]
) -> None:
    journey = FakeJourney()
    async with connect(services(journey=journey)) as client:
        answers = [await client.post(path, json=body) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert "the key's limit is 2; too little is left now; try again in 60 s" in answers[-1].text
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == ["1", "0", "0"]
    for one in answers:
        assert one.headers["x-ratelimit-limit-requests"] == "2"
        assert one.headers["x-ratelimit-reset-requests"] == "1m1s"
        assert one.headers["x-ratelimit-limit-tokens"] == "9000"
        assert one.headers["x-ratelimit-remaining-tokens"] == "9000"
        assert one.headers["x-ratelimit-reset-tokens"] == "0s"
    error = answers[2].json()["error"]
    assert (
        error.get("sluice_code", error["code"]) == "rate_limited"
        and answers[2].headers["retry-after"] == "60"
    )
    assert len(journey.requests) == 2
    if path.startswith("/v1/chat"):
        assert error["type"] == "rate_limit_error"


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/chat/completions", "/v1/messages"])
async def test_official_clients_are_told_not_to_repeat_what_no_retry_can_change(
    connect: Connect, path: str
) -> None:
    journey, body = FakeJourney(), {**CHAT, "max_tokens": 9} if path != "/v1/generate" else NATIVE
    async with connect(services(replace(LIMITED, limits=KeyLimits()), journey)) as client:
        found = []
        for status, code, wait_ms in (
            (429, "rate_limited", 61_000),
            (429, "quota_exceeded", 80_000_000),
            (429, "rate_limited", None),
            (409, "duplicate_request", None),
            (409, "idempotency_conflict", None),
        ):
            journey.error = PublicError(status, code, "spent", retry_after_ms=wait_ms)
            headers = (await client.post(path, json=body)).headers
            found.append((headers.get("retry-after"), headers.get("x-should-retry")))
    assert found == [("61", None), ("80000", "false"), ("1", "false"), (None, None), (None, "false")]


async def test_a_limit_of_a_minute_never_asks_a_client_to_wait_longer_than_a_minute() -> None:
    limiter, waits = KeyLimiter(Quotas(clock=lambda: 100.0)), []
    for number, limits in enumerate((KeyLimits(tokens_per_minute=9), KeyLimits(tokens_per_day=9))):
        caller = replace(LIMITED, key_id=f"key_{number}", limits=limits)
        await limiter.spend(caller, 9)
        with pytest.raises((RateLimited, QuotaExceeded)) as refused:
            await limiter.spend(caller, 9)
        waits.append(refused.value.retry_after_ms)
    assert waits[0] == 60_000 and waits[1] > 86_000_000


async def test_an_invalid_request_counts_and_has_the_rate_limit_headers(connect: Connect) -> None:
    async with connect(services()) as client:
        wrong = await client.post("/v1/generate", json={"messages": 1})
        assert (wrong.status_code, wrong.headers["x-ratelimit-remaining-requests"]) == (422, "1")


async def test_a_read_does_not_count_and_has_the_rate_limit_headers(connect: Connect) -> None:
    async with connect(services()) as client:
        for _ in range(5):
            models = await client.get("/v1/models")
            assert (models.status_code, models.headers["x-ratelimit-remaining-requests"]) == (200, "2")


async def test_answers_to_an_unlimited_key_have_no_rate_limit_headers(connect: Connect) -> None:
    async with connect(services(replace(LIMITED, limits=KeyLimits()))) as client:
        for _ in range(5):
            answer = await client.post("/v1/generate", json=NATIVE)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_a_repeated_answer_counts_as_a_request(connect: Connect) -> None:
    journey = FakeJourney()
    async with connect(services(journey=journey)) as client:
        headers = {"idempotency-key": "once"}
        answers = [await client.post("/v1/generate", json=NATIVE, headers=headers) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert answers[1].headers["x-idempotent-replay"] == "true" and len(journey.requests) == 1
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_websocket_has_the_rate_limit_header_in_its_handshake_and_is_refused_by_an_event() -> None:
    got = []
    with serving(services()) as url:
        address = url.replace("http", "ws") + "/v1/generate/ws"
        for _ in range(3):
            async with websockets.connect(
                address, additional_headers={"authorization": "Bearer x"}
            ) as socket:
                assert socket.response is not None
                got.append(socket.response.headers["x-ratelimit-remaining-requests"])
                await socket.send(json.dumps(NATIVE))
                events = [json.loads(one) async for one in socket]
                assert socket.close_code == 1000
    assert got == ["2", "1", "0"]
    assert events[-1]["type"] == "error" and events[-1]["error"]["code"] == "rate_limited"
    assert events[-1]["error"]["retry_after_ms"] == 60_000
