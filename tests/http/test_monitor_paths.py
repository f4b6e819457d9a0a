from __future__ import annotations

from typing import Any

from gateway.http.testing import ADMIN_KEY, FakeHealth, fake_services

NO_KEY = {"authorization": ""}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


async def test_liveness_readiness_and_metrics_ask_for_no_key(connect: Any) -> None:
    async with connect(fake_services()) as client:
        ping = await client.get("/ping", headers=NO_KEY)
        ready = await client.get("/ready", headers=NO_KEY)
        metrics = await client.get("/metrics", headers=NO_KEY)
    assert ping.json() == {"status": "healthy", "uptime_seconds": 1.5}
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert b"sluice_up" in metrics.content


async def test_what_is_not_ready_is_503_while_liveness_stays_200(connect: Any) -> None:
    async with connect(fake_services(health=FakeHealth(is_ready=False))) as client:
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/ping")).status_code == 200
        assert (await client.get("/health/deep", headers=ADMIN)).status_code == 503


async def test_the_deep_check_is_for_admins(connect: Any) -> None:
    async with connect(fake_services()) as client:
        caller = await client.get("/health/deep")
        admin = await client.get("/health/deep", headers=ADMIN)
    assert caller.status_code == 403
    assert caller.json()["error"]["code"] == "forbidden"
    assert admin.json() == {"status": "healthy", "running": 0}


async def test_probes_may_use_head(connect: Any) -> None:
    async with connect(fake_services()) as client:
        assert (await client.head("/ping")).status_code == 200
