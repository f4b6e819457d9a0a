"""Limits, ports and revocations of real gateway processes on one store."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.quota_accuracy import fleet, measure, tenants_of
from tests.integration.live import ADMIN_KEY, gateway
from tests.state.servers import redis_server

SECONDS = 4.0


@pytest.mark.parametrize("store", ["redis", "sqlite"])
def test_tenants_that_hammer_two_processes_get_their_limits_and_nothing_more(
    tmp_path: Path, store: str
) -> None:
    """The small form of ``python -m benchmarks.quota_accuracy``."""
    tenants = tenants_of(6, requests=20, tokens=30_000)
    if store == "sqlite":
        with fleet(tmp_path, f"sqlite:///{tmp_path}/state.db", 2) as urls:
            result = asyncio.run(measure(urls, store, tenants, 1, SECONDS, 10, again=False))
    else:
        with (
            redis_server(tmp_path / "redis", durable=False) as server,
            fleet(tmp_path, server.url, 2) as urls,
        ):
            result = asyncio.run(measure(urls, store, tenants, 1, SECONDS, 10, again=False))
    assert not result.failed and result.refused > 0
    if not result.misses:
        assert result.requests_most == 1.0, "exactly the limit, though two processes count"
        assert result.overshot == 0
    assert result.requests_least >= 1.0
    assert result.unused_reserves < 1.0, "nothing was refused that fits"


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
        # The host that a caller names opens nothing.
        claimed = {"Authorization": f"Bearer {ADMIN_KEY}", "Host": f"127.0.0.1:{port}"}
        assert httpx.get(f"{live.url}/admin/keys", headers=claimed).status_code == 404
        shown = [httpx.get(f"{url}/openapi.json").json()["paths"] for url in (live.url, admin)]
        assert not [path for path in shown[0] if path.startswith("/admin")]
        assert "/admin/keys" in shown[1] and "/v1/generate" not in shown[1]
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
        for url in (live.url, admin):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/ping", timeout=2)
