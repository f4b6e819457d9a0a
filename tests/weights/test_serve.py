"""A real gateway whose model is in S3: alive while it loads, one clear line when it cannot."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import fork_server
from tests.integration.live import ROOT, environment, gateway, wait_ready
from tests.weights.conftest import BUCKET
from tests.weights.network_proxy import Proxy

DEMO = ROOT / "models" / "demo"


@pytest.fixture
def demo(s3: Any) -> Any:
    """Put the demo model into the bucket; return the client."""
    for path in DEMO.iterdir():
        s3.put_object(Bucket=BUCKET, Key=f"demo/{path.name}", Body=path.read_bytes())
    return s3


def settings(network: Proxy, folder: Path) -> dict[str, str]:
    return {
        "SLUICE_ENGINE__MODEL": f"s3://{BUCKET}/demo",
        "SLUICE_WEIGHTS__ENDPOINT_URL": network.url,
        "SLUICE_WEIGHTS__CACHE_FOLDER": str(folder / "cache"),
    }


def test_it_is_alive_while_weights_arrive_and_answers_when_they_are_here(
    demo: Any, network: Proxy, tmp_path: Path
) -> None:
    network.rate = 1 << 18
    env = settings(network, tmp_path)
    with gateway(tmp_path, ready=False, **env) as live:
        pings = 0
        while (ready := httpx.get(f"{live.url}/ready", timeout=30)).status_code == 503 and pings < 5:
            assert ready.json()["checks"]["model_loaded"] is False
            assert httpx.get(f"{live.url}/ping", timeout=30).json()["status"] == "healthy"
            pings += 1
            time.sleep(0.2)
        assert pings == 5, "the weights take half a minute over this network"
        network.rate = None
        wait_ready(live)
        body = {"messages": [{"role": "user", "content": "hello"}], "sampling": {"max_tokens": 4}}
        answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=30).json()
        assert answer["usage"]["output_tokens"] == 4 and answer["backend"] == "embedded"
        models = httpx.get(f"{live.url}/v1/models", headers=live.headers, timeout=60).json()["data"]
        assert "demo" in [model["id"] for model in models]
    network.ranges.clear()
    with gateway(tmp_path, **env):
        assert network.ranges == [], "the second start fetches nothing"


def test_weights_that_cannot_be_had_end_the_start_with_one_line(
    demo: Any, network: Proxy, tmp_path: Path
) -> None:
    demo.put_object(Bucket=BUCKET, Key="demo/SHA256SUMS", Body=f"{'0' * 64}  model.safetensors\n".encode())
    with gateway(tmp_path, ready=False, **settings(network, tmp_path)) as live:
        assert live.process.wait(60) == 1
        reported = [line for line in live.log.read_text().splitlines() if line.startswith("sluice: ")]
        assert f"s3://{BUCKET}/demo/model.safetensors: its sha256 is" in reported[0]
        assert "Traceback" not in live.log.read_text()


def test_a_drain_while_weights_arrive_ends_at_once(demo: Any, network: Proxy, tmp_path: Path) -> None:
    network.rate = 1 << 19
    with gateway(tmp_path, ready=False, **settings(network, tmp_path)) as live:
        assert httpx.get(f"{live.url}/ready", timeout=30).status_code == 503
        began = time.monotonic()
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
        assert time.monotonic() - began < 15


def run_doctor(tmp_path: Path, **env: str) -> tuple[int, dict[str, Any]]:
    words = [sys.executable, "-m", "ops.cli", "doctor", "--config", "sluice.yaml", "--json"]
    databases = {
        "SLUICE_STATE__URL": f"sqlite:///{tmp_path}/s.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{tmp_path}/l.db",
    }
    done = fork_server.run(words, cwd=ROOT, env=environment(databases | env), timeout=200)
    return done.returncode, json.loads(done.stdout)


def test_doctor_fetches_like_a_start_and_reports_failures(demo: Any, network: Proxy, tmp_path: Path) -> None:
    code, reported = run_doctor(tmp_path, **settings(network, tmp_path))
    assert code == 0 and reported["ok"], reported
    demo.put_object(Bucket=BUCKET, Key="demo/SHA256SUMS", Body=f"{'0' * 64}  model.safetensors\n".encode())
    code, reported = run_doctor(tmp_path, **settings(network, tmp_path / "second"))
    assert code == 1 and reported["checks"][-1]["check"] == "weights"
    nowhere = settings(network, tmp_path) | {"SLUICE_ENGINE__MODEL": f"s3://{BUCKET}/none"}
    code, reported = run_doctor(tmp_path, **nowhere)
    assert code == 1 and "check the bucket" in reported["checks"][-1]["detail"]
