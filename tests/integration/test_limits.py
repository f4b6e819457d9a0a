"""Limits, ports and revocations of real gateway processes on one store."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.quota_accuracy import Result, fleet, measure, tenants_of
from tests.integration.live import ADMIN_KEY, gateway
from tests.state.servers import redis_server

# Tried in this order: a slow machine needs longer. All are so short that a one-minute window does not move.
SECONDS = (4.0, 15.0, 45.0)


@pytest.mark.parametrize("store", ["redis", "sqlite"])
def test_tenants_that_hammer_two_processes_get_their_limits_and_nothing_more(
    tmp_path: Path, store: str
) -> None:
    """The small form of ``python -m benchmarks.quota_accuracy``."""
    for seconds in SECONDS:
        result = hammer(tmp_path / f"{seconds}", store, seconds)
        assert not result.failed
        if not result.misses:
            assert result.requests_most <= 1.0, "never beyond the limit, though two processes count"
            assert result.overshot == 0
        if result.requests_least >= 1.0 and result.unused_reserves < 1.0:
            break  # else the machine was too slow to reach the limits, or a request that fits was refused
    assert result.refused > 0 and result.requests_least >= 1.0
    assert result.unused_reserves < 1.0, "nothing was refused that fits"


def hammer(folder: Path, store: str, seconds: float) -> Result:
    folder.mkdir()
    tenants = tenants_of(6, requests=20, tokens=30_000)
    with ExitStack() as stack:
        url = f"sqlite:///{folder}/state.db"
        if store == "redis":
            url = stack.enter_context(redis_server(folder / "redis", durable=False)).url
        urls = stack.enter_context(fleet(folder, url, 2))
        return asyncio.run(measure(urls, store, tenants, 1, seconds, 10, again=False))


def status(url: str, path: str, key: str = ADMIN_KEY) -> int:
    return httpx.get(f"{url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=30).status_code


def test_operators_have_a_port_of_their_own_and_both_drain_together(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = tmp_path / "sluice.json"
    config.write_text(
        json.dumps(
            {
                "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
                "backends": {
                    "w": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "base"}
                },
                "routing": {"file": str(tmp_path / "routing.yaml")},
                "server": {"admin_port": port},
            }
        )
    )
    route = {"backends": [{"name": "w", "weight": 100}], "fallback": []}
    (tmp_path / "routing.yaml").write_text(json.dumps({"routes": {"self_hosted_generation": route}}))
    with gateway(tmp_path, ready=False, config=config) as live:
        admin = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                assert status(live.url, "/ping") == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, live.log.read_text()
                time.sleep(0.05)
        for path in ("/admin/keys", "/admin/routing", "/admin/nowhere"):
            assert status(live.url, path) == 404
        assert [status(admin, path) for path in ("/admin/keys", "/ping", "/metrics")] == [200] * 3
        assert [status(admin, path) for path in ("/v1/models", "/openapi.json")] == [404, 200]
        assert status(admin, "/admin/keys", "wrong") == 401
        # The Host header that a caller sends gives no access.
        claimed = {"Authorization": f"Bearer {ADMIN_KEY}", "Host": f"127.0.0.1:{port}"}
        assert httpx.get(f"{live.url}/admin/keys", headers=claimed, timeout=60).status_code == 404
        # Descriptions of the gateway are for operators only, the document of the callers' paths too.
        for path in ("/metrics", "/openapi.json", "/docs", "/docs/assets/swagger-ui-bundle.js"):
            assert [status(url, path) for url in (live.url, admin)] == [404, 200], path
        assert [status(live.url, path) for path in ("/ping", "/health", "/ready")] == [200, 200, 503]
        assert {"/admin/keys", "/v1/generate"} <= set(
            httpx.get(f"{admin}/openapi.json", timeout=60).json()["paths"]
        )
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
        for url in (live.url, admin):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/ping", timeout=2)
