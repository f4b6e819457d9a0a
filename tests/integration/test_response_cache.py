"""Two real gateways with one Redis: one serves the other's answers when its own engine is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx

from tests.integration.live import LiveGateway, gateway, wait_ready
from tests.state.servers import redis_server

ROUTING = """
routes:
  self_hosted_generation:
    backends: [{name: local, weight: 100}]
    fallback: [response_cache, degraded]
    resume: {enabled: false}
"""


def ask(live: LiveGateway, text: str, **more: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": text}], "sampling": {"max_tokens": 200}, **more}
    reply = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, object] = reply.json()
    return answer


def test_an_outage_is_answered_from_what_any_gateway_has_answered(tmp_path: Path) -> None:
    (tmp_path / "routing.yaml").write_text(ROUTING)
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with redis_server(tmp_path / "redis") as redis:
        env = {
            "SLUICE_RESPONSE_CACHE__URL": redis.url,
            "SLUICE_RESPONSE_CACHE__TIMEOUT_MS": "10000",
            "SLUICE_ROUTING__FILE": str(tmp_path / "routing.yaml"),
            "SLUICE_ENGINE__MAX_RESTARTS_PER_HOUR": "0",
        }
        with gateway(folders[0], ready=False, **env) as one, gateway(folders[1], **env) as other:
            wait_dead(other)
            wait_ready(one)
            first = ask(one, "Who created Berserk?")
            assert first["finish_reason"] == "stop" and first["fallback"] is None

            same = until_cached(other, "Who created Berserk?")
            assert (same["output_text"], same["warnings"]) == (first["output_text"], [])
            for text, more in (
                ("Who created Bleach?", {}),
                ("Who created Berserk?", {"context": {"customer": "Petra"}}),
                ("Who created Berserk?", {"locale": "ja"}),
            ):
                assert ask(other, text, **more)["finish_reason"] == "degraded", text
            lookups = httpx.get(f"{other.url}/metrics", timeout=60).text
            assert 'sluice_response_cache_lookups_total{kind="exact"} 1.0' in lookups

            redis.kill()
            assert ask(other, "Who created Berserk?")["finish_reason"] == "degraded"
            assert ask(one, "Who created Naruto?")["fallback"] is None
            redis.start()
            back = until_cached(other, "Who created Berserk?")
            assert back["output_text"] == first["output_text"]
            assert other.log.read_text().count("response cache not reached") == 1


def wait_dead(live: LiveGateway) -> None:
    """Kill the engine, which is not restarted, and wait until the gateway is not ready."""
    os.kill(live.engine_pid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while httpx.get(f"{live.url}/ready", timeout=60).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_cached(live: LiveGateway, text: str) -> dict[str, object]:
    deadline = time.monotonic() + 60
    while True:
        answer = ask(live, text)
        if answer["finish_reason"] != "degraded":
            assert answer["fallback"]["kind"] == "response_cache"  # type: ignore[index]
            return answer
        assert time.monotonic() < deadline, live.log.read_text()
        time.sleep(0.1)
