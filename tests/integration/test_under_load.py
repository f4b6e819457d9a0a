"""Many callers at once: the event loop stays responsive, and callers who disconnect leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.integration.live import LiveGateway, gateway

# As many as the README says; `SLUICE_TEST_DISCONNECTS=10000` for a close look.
DISCONNECTS = int(os.environ.get("SLUICE_TEST_DISCONNECTS", "2000"))
# They come in storms. Pools and caches grow until they are warm, which takes more storms on a busy machine; a leak
# grows in every storm.
STORMS, MOST_STORMS = 4, 12
# A storm's growth that is none: 40 KiB for each disconnect.
GROWTH_MIB = 40 * (DISCONNECTS // STORMS) / 1024
# Longest wait for the gateway to work off a storm, which comes faster than a busy machine serves it.
REST_S = 150.0


def body(seed: int, *, stream: bool, tokens: int = 120) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": f"Tell me about shipping, please, number {seed}"}],
        "sampling": {"max_tokens": tokens, "temperature": 1.0, "seed": seed},
        "stream": stream,
    }


def p99(ordered: list[float]) -> float:
    return ordered[int(len(ordered) * 0.99)]


@pytest.mark.serial
def test_ping_answers_within_100_ms_at_p99_while_32_streams_decode(tmp_path: Path) -> None:
    """The limit grows with the delays of this process: the machine may delay the gateway as well."""

    async def measure(live: LiveGateway) -> tuple[list[float], list[float]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(headers=live.headers, timeout=120, limits=limits) as client:
            taken: list[float] = []
            held_up: list[float] = []
            done = asyncio.Event()

            async def ping() -> None:
                while not done.is_set():
                    begun = time.perf_counter()
                    response = await client.get(f"{live.url}/ping")
                    taken.append(time.perf_counter() - begun)
                    assert response.json()["status"] == "healthy"
                    begun = time.perf_counter()
                    await asyncio.sleep(0.005)
                    held_up.append(time.perf_counter() - begun - 0.005)

            async def stream(seed: int) -> None:
                for round_number in range(3):
                    asked = body(seed + 100 * round_number, stream=True, tokens=200)
                    async with client.stream("POST", f"{live.url}/v1/generate", json=asked) as response:
                        events = [line async for line in response.aiter_lines() if line]
                    assert json.loads(events[-1][6:])["type"] == "done"

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ping())
                async with asyncio.TaskGroup() as streams:
                    for seed in range(32):
                        streams.create_task(stream(seed))
                done.set()
            return sorted(taken), sorted(held_up)

    measured = []
    with gateway(tmp_path) as live:
        for _ in range(3):  # a stalled machine recovers; a blocked event loop does not
            taken, held_up = asyncio.run(measure(live))
            live.wait_until_idle()
            assert len(taken) > 20
            measured.append((p99(taken), p99(held_up)))
            if p99(taken) < 0.1 + 2 * p99(held_up):
                return
    raise AssertionError(f"p99 of a ping, and of what the machine held this process up, seconds: {measured}")


def disconnect(live: LiveGateway, rng: random.Random) -> None:
    """Send a request or a part of it, read for a moment (or not at all), and disconnect."""
    where = urlsplit(live.url)
    content = json.dumps(body(rng.randrange(10**6), stream=rng.random() < 0.7)).encode()
    head = (
        f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nAuthorization: {live.headers['Authorization']}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    with socket.create_connection((where.hostname, where.port), REST_S) as connection:
        cut = rng.random()
        if cut < 0.1:  # in the middle of the request
            connection.sendall((head + content)[: rng.randrange(1, len(head) + len(content))])
            return
        connection.sendall(head + content)
        if cut < 0.8:
            connection.settimeout(rng.uniform(0.001, 0.15))
            try:
                connection.recv(rng.choice([1, 200, 4096]))
            except TimeoutError:
                return


def rss_mib(live: LiveGateway) -> float:
    process = psutil.Process(live.process.pid)
    return float(sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])) / 2**20


def connections_of(live: LiveGateway) -> int:
    return len(psutil.Process(live.process.pid).net_connections())


def test_two_thousand_disconnects_under_load_leave_nothing_behind(tmp_path: Path) -> None:
    """What gateways are known to leak: sequences that run on, gauges that never return, memory."""

    async def storm(live: LiveGateway, count: int, seed: int) -> None:
        rng = random.Random(seed)
        slots = asyncio.Semaphore(24)

        async def one(number: int) -> None:
            async with slots:
                await asyncio.to_thread(disconnect, live, random.Random(rng.random() + number))

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(one(number))

    with gateway(tmp_path, SLUICE_ADMISSION__MAX_QUEUE="1000", SLUICE_ADMISSION__MAX_WAIT_MS="60000") as live:
        connections, taken_mib = connections_of(live), [rss_mib(live)]
        while len(taken_mib) <= STORMS or taken_mib[-1] - taken_mib[-2] >= GROWTH_MIB:
            assert len(taken_mib) <= MOST_STORMS, taken_mib
            asyncio.run(storm(live, DISCONNECTS // STORMS, seed=len(taken_mib)))
            live.wait_until_idle(REST_S)
            taken_mib.append(rss_mib(live))
        # A busy gateway has not read the end of all connections whose request was never whole.
        deadline = time.monotonic() + REST_S
        while (open_now := connections_of(live)) > connections + 2:
            assert time.monotonic() < deadline, (open_now, connections)
            time.sleep(0.05)
        answer = httpx.post(
            f"{live.url}/v1/generate", json=body(1, stream=False), headers=live.headers, timeout=60
        )
        assert answer.status_code == 200 and answer.json()["fallback"] is None
        assert "internal error" not in live.log.read_text()
        assert "Traceback" not in live.log.read_text()
