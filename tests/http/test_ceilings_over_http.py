"""The concurrency limits of keys, over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
import websockets.asyncio.client

from accounting.keys import KeyLimits
from gateway.contracts.origin import EdgeRequest
from gateway.keys.ceilings import Ceilings
from gateway.keys.rate_limits import KeyLimiter
from gateway.testing import CALLER_KEY, FakeJourney, fake_services, serving
from tests.http.conftest import Connect
from tests.http.fakes import eventually

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


async def arrivals(journey: FakeJourney, count: int) -> None:
    while not journey.arrived(count):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_request_over_the_concurrency_limit_is_429_and_a_later_one_is_answered(
    connect: Connect,
) -> None:
    limiter = KeyLimiter(ceilings=Ceilings(KeyLimits(), 2, clock=time.monotonic))
    journey = FakeJourney(holds=True)
    async with connect(fake_services(journey, limiter=limiter)) as client, asyncio.TaskGroup() as group:

        async def ask() -> httpx.Response:
            return await client.post(
                "/v1/chat/completions", json=BODY, headers={"Authorization": f"Bearer {CALLER_KEY}"}
            )

        held = [group.create_task(ask()) for _ in range(2)]
        async with asyncio.timeout(60):
            await arrivals(journey, 2)
        refused = await ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["sluice_code"] == "rate_limited"
        journey.resume()
        assert [(await one).status_code for one in held] == [200, 200]
        assert (await ask()).status_code == 200
    assert not limiter.ceilings._running


@pytest.mark.parametrize(
    ("body", "headers"), [({}, {}), ({"stream": True}, {}), ({}, {"idempotency-key": "again"})]
)
async def test_a_request_over_the_concurrency_limit_is_reported(
    connect: Connect, body: dict[str, Any], headers: dict[str, str]
) -> None:
    limiter = KeyLimiter(ceilings=Ceilings(KeyLimits(), 0, clock=time.monotonic))
    outcomes: list[EdgeRequest] = []
    async with connect(fake_services(limiter=limiter, emit_edge=outcomes.append)) as client:
        auth = {"Authorization": f"Bearer {CALLER_KEY}"}
        await client.post("/v1/chat/completions", json={**BODY, **body}, headers={**auth, **headers})
    told = [(one.contract, one.status, one.error and one.error.code) for one in outcomes]
    assert told == [("chat", 429, "rate_limited")]


async def test_a_websocket_over_the_concurrency_limit_is_reported() -> None:
    limiter = KeyLimiter(ceilings=Ceilings(KeyLimits(), 0, clock=time.monotonic))
    outcomes: list[EdgeRequest] = []
    services = fake_services(limiter=limiter, emit_edge=outcomes.append)
    with serving(services) as base:
        url, auth = f"{base.replace('http', 'ws')}/v1/generate/ws", {"Authorization": f"Bearer {CALLER_KEY}"}
        async with websockets.asyncio.client.connect(url, additional_headers=auth) as socket:
            await socket.send(json.dumps({"messages": BODY["messages"]}))
            assert json.loads(await socket.recv())["error"]["code"] == "rate_limited"
        eventually(lambda: bool(outcomes))
    told = [(one.contract, one.status, one.error and one.error.code) for one in outcomes]
    assert told == [("native", 429, "rate_limited")]


async def test_tokenize_and_embeddings_count_against_the_concurrency_limit_too(connect: Connect) -> None:
    limiter = KeyLimiter(ceilings=Ceilings(KeyLimits(), 1, clock=time.monotonic))
    journey = FakeJourney(holds=True)
    headers = {"Authorization": f"Bearer {CALLER_KEY}"}
    async with connect(fake_services(journey, limiter=limiter)) as client, asyncio.TaskGroup() as group:
        held = group.create_task(client.post("/v1/chat/completions", json=BODY, headers=headers))
        async with asyncio.timeout(60):
            await arrivals(journey, 1)
        paths = {
            "/tokenize": {"model": "demo", "prompt": "hi"},
            "/v1/embeddings": {"model": "demo", "input": "hi"},
        }
        for path, body in paths.items():
            assert (await client.post(path, json=body, headers=headers)).status_code == 429
        journey.resume()
        assert (await held).status_code == 200
        for path, body in paths.items():
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
    assert not limiter.ceilings._running
