"""Draining: the gateway is first not ready, then closed, then empty."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from budgeting.values import Message, Role
from gateway.admin.drain import DrainAdmin
from gateway.app import create_app
from gateway.config.settings import ServerConfig
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import Draining
from gateway.requests.in_flight import InFlightRequests
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore
from gateway.testing import ADMIN_KEY, CALLER_KEY, fake_services


def request_of(request_id: str = "req_1") -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        generation_id="gen_1",
        contract=Contract.NATIVE,
        caller=Caller("acme", CallerRole.CALLER, "key_1"),
        arrived_at=0.0,
        created=1_700_000_000,
        messages=(Message(Role.USER, "hello"),),
    )


def test_without_a_lame_duck_time_requests_are_refused_from_the_first_moment() -> None:
    requests = InFlightRequests(lame_duck_s=0.0)
    assert not requests.draining
    requests.drain()
    assert requests.draining
    with pytest.raises(Draining), requests.receive(request_of()):
        raise AssertionError("nobody is let in")


async def test_a_request_in_the_lame_duck_time_is_accepted_and_waited_for() -> None:
    requests = InFlightRequests(lame_duck_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        running, empty = tasks.create_task(requests.run()), tasks.create_task(requests.drained())
        requests.drain()
        assert requests.draining, "not ready at once"
        with requests.receive(request_of()):
            async with asyncio.timeout(60):
                await running
            with pytest.raises(Draining), requests.receive(request_of(request_id="later")):
                raise AssertionError("the time is over")
            assert not empty.done() and requests.in_flight == 1
        async with asyncio.timeout(60):
            await empty


async def test_a_cut_ends_the_lame_duck_time_too() -> None:
    requests = InFlightRequests(lame_duck_s=3600.0)
    requests.drain()
    requests.cut()
    with pytest.raises(Draining), requests.receive(request_of()):
        raise AssertionError("nobody is let in")
    async with asyncio.timeout(60):
        await requests.drained()


async def test_an_operator_drains_once_and_may_ask_again() -> None:
    requests, store = InFlightRequests(), MemoryStateStore(unix_time=lambda: 0.0)
    admin = DrainAdmin(requests, Audit(store, unix_time=lambda: 0.0))
    transport = httpx.ASGITransport(create_app(fake_services(drain=admin)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gw") as client:
        refused = await client.post("/admin/drain", headers={"authorization": f"Bearer {CALLER_KEY}"})
        assert refused.status_code == 403 and not requests.draining
        for _ in range(2):
            response = await client.post("/admin/drain", headers={"authorization": f"Bearer {ADMIN_KEY}"})
            assert response.json() == {"draining": True, "closed": True, "in_flight": 0}
    assert requests.draining
    records = await store.read("audit")
    assert len(records) == 1, "what was done once is told once"


def test_load_balancers_are_waited_for_within_the_drain() -> None:
    fitting: Any = {"drain_seconds": 5, "lame_duck_seconds": 5}
    assert ServerConfig(**fitting).lame_duck_seconds == 5
    with pytest.raises(
        ValidationError, match=r"lame_duck_seconds is 6; allowed: at most server\.drain_seconds, 5"
    ):
        ServerConfig(drain_seconds=5, lame_duck_seconds=6)
