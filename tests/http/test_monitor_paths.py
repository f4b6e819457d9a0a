from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import load_settings
from gateway.testing import ADMIN_KEY, CALLER_KEY, OPERATOR_KEY, FakeHealth, fake_services
from gateway.wiring.build import build

NO_KEY = {"authorization": ""}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


async def test_metrics_ask_for_an_operators_key_when_told_to(connect: Any) -> None:
    async with connect(fake_services(open_metrics=False)) as client:
        statuses = {
            key: (
                await client.get("/metrics", headers={"authorization": key and f"Bearer {key}"})
            ).status_code
            for key in ("", CALLER_KEY, OPERATOR_KEY, ADMIN_KEY)
        }
        ping = await client.get("/ping", headers=NO_KEY)
    assert statuses == {"": 401, CALLER_KEY: 403, OPERATOR_KEY: 200, ADMIN_KEY: 200}
    assert ping.status_code == 200


@pytest.mark.parametrize("asked", [False, True])
def test_the_configuration_tells_whether_metrics_ask_for_a_key(tmp_path: Path, asked: bool) -> None:
    (tmp_path / "sluice.yaml").write_text(
        f"auth: {{metrics: {str(asked).lower()}}}\n"
        f"state: {{url: 'sqlite:///{tmp_path}/s.db'}}\n"
        f"ledger: {{url: 'sqlite+aiosqlite:///{tmp_path}/l.db'}}\n"
    )
    built = build(
        load_settings(tmp_path / "sluice.yaml", {}),
        admin_key="a-key-of-an-admin-0123456789abcdef0123456789abcdef",
    )
    assert built.services.open_metrics is not asked


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
        for path in ("/ready", "/health/deep"):
            down = await client.get(path, headers=ADMIN)
            assert (down.status_code, down.headers["retry-after"]) == (503, "1")
        assert (await client.get("/ping")).status_code == 200


async def test_liveness_has_the_path_that_vllms_clients_know(connect: Any) -> None:
    async with connect(fake_services()) as client:
        health = await client.get("/health", headers=NO_KEY)
        ping = await client.get("/ping", headers=NO_KEY)
    assert (health.status_code, health.json()) == (200, ping.json())


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
