"""A backend that hangs does not delay requests to another backend."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest
import yaml

from benchmarks.bedrock.stand_in import Behaviour, stand_in
from tests.bedrock.conftest import CREDENTIALS, HAIKU
from tests.integration.live import ROOT, LiveGateway, gateway

# More than either hanging backend takes at once: 8 lanes and a queue of 16, or 16 connections.
HANGING = 40
ASKS = 25
# Allows for the noise of a small, busy machine: waiting for a hung backend would take whole seconds.
MOST_SLOWER, LEAST_S = 4.0, 0.5


@contextmanager
def silent_worker() -> Iterator[str]:
    """A worker whose probes answer and whose requests never do."""
    stop = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.close_connection = True
            stop.wait()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Silent)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def config(folder: Path, bedrock: str, worker: str) -> Path:
    settings = yaml.safe_load((ROOT / "sluice.yaml").read_text())
    settings["backends"] = {
        "local": {"kind": "engine"},
        "bedrock": {
            "kind": "bedrock", "model_id": HAIKU, "region": "us-east-1", "endpoint_url": bedrock,
            "max_concurrency": 8,
        },
        "worker": {
            "kind": "openai", "base_urls": [worker], "model": "base", "metrics_path": None,
            "max_connections": 16, "probe_interval_seconds": 0.2, "probe_timeout_seconds": 30,
        },
    }  # fmt: skip
    routes = {
        name: {"backends": [{"name": name, "weight": 100}], "fallback": []}
        for name in ("local", "bedrock", "worker")
    }
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": routes, "openai_route": "local"}))
    settings["routing"] = {"file": str(folder / "routing.yaml")}
    settings["admission"] = {"max_wait_ms": 20_000}
    (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sluice.yaml"


async def ask(session: aiohttp.ClientSession, live: LiveGateway, route: str) -> float:
    body = {
        "route": route,
        "messages": [{"role": "user", "content": "Something like Vinland Saga?"}],
        "sampling": {"max_tokens": 12, "temperature": 0},
    }
    began = time.monotonic()
    async with session.post(f"{live.url}/v1/generate", json=body) as response:
        await response.read()
        if route == "local":
            assert response.status == 200
    return time.monotonic() - began


async def median_s(session: aiohttp.ClientSession, live: LiveGateway) -> float:
    return statistics.median([await ask(session, live, "local") for _ in range(ASKS)])


async def compare(live: LiveGateway) -> tuple[float, float]:
    """The engine's median response times in seconds: alone, and while both other backends hang."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(headers=live.headers, connector=connector, timeout=timeout) as session:
        await median_s(session, live)
        alone_s = await median_s(session, live)
        async with asyncio.TaskGroup() as group:
            hanging = [
                group.create_task(ask(session, live, route))
                for route in ("bedrock", "worker")
                for _ in range(HANGING)
            ]
            await asyncio.sleep(0.5)
            with_hanging_s = await median_s(session, live)
            still = sum(not task.done() for task in hanging)
            for task in hanging:
                task.cancel()
    assert still >= 16, "they do hang, as many as the backends take"
    return alone_s, with_hanging_s


@pytest.mark.serial
@pytest.mark.timeout(600)
def test_two_hanging_backends_do_not_slow_down_the_third(tmp_path: Path) -> None:
    with stand_in() as bedrock, silent_worker() as worker:
        bedrock.always["us-east-1"] = Behaviour(hang_before=True)
        path = config(tmp_path, bedrock.url, worker)
        with gateway(tmp_path, config=path, **CREDENTIALS) as live:
            alone_s, with_hanging_s = asyncio.run(compare(live))
            print(
                f"p50 alone {alone_s * 1000:.1f} ms, beside 80 hanging requests {with_hanging_s * 1000:.1f} ms"
            )
            assert with_hanging_s < alone_s * MOST_SLOWER + LEAST_S
            live.wait_until_idle(60)
