"""Draining: the gateway is first not ready, then closed, then empty."""

from __future__ import annotations

import asyncio
import signal
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
from gateway.server import DrainingServer
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore
from gateway.testing import ADMIN_KEY, CALLER_KEY, fake_services

NO_CONFIG: Any = None  # of a server that never listens


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


async def test_a_second_signal_cuts_and_waits_for_the_errors_and_a_third_one_does_not() -> None:
    requests = InFlightRequests()
    server, may_end = DrainingServer(NO_CONFIG, requests), asyncio.Event()
    entered, failing = asyncio.Event(), asyncio.Event()

    async def fails_late() -> None:
        try:
            with requests.receive(request_of()):
                entered.set()
                await asyncio.Event().wait()
        except Draining:
            with requests.reporting():
                failing.set()
                await may_end.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(fails_late())
        draining = tasks.create_task(server.drain(3_600.0))
        await entered.wait()
        server.handle_exit(signal.SIGINT, None)
        await settled()
        assert not failing.is_set()
        server.handle_exit(signal.SIGINT, None)
        await failing.wait()
        await settled()
        assert not server.should_exit and not draining.done()
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit and server.force_exit
        may_end.set()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_drain_ends_with_the_last_request() -> None:
    requests = InFlightRequests()
    server = DrainingServer(NO_CONFIG, requests)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(server.drain(3_600.0))
        with requests.receive(request_of()):
            server.handle_exit(signal.SIGTERM, None)
            await settled()
            assert not draining.done() and not server.should_exit
        await draining
    assert server.should_exit and not server.force_exit


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
