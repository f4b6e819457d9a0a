"""An engine that dies or hangs under a running gateway, as an operator and a load balancer see it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.integration.live import LiveGateway, gateway

BODY = {
    "messages": [{"role": "user", "content": "Recommend something like Vinland Saga"}],
    "sampling": {"max_tokens": 8},
}
BACK_TIMEOUT_S = 60.0


def until(met: Callable[[], object], timeout_s: float) -> float:
    """Wait until ``met()``; how many seconds it took. Raises AssertionError after ``timeout_s``."""
    begun = time.monotonic()
    while not met():
        assert time.monotonic() - begun < timeout_s, "it did not come to pass"
        time.sleep(0.005)
    return time.monotonic() - begun


def ready(live: LiveGateway) -> httpx.Response:
    return httpx.get(f"{live.url}/ready", timeout=60)


def answers(live: LiveGateway) -> bool:
    answer = httpx.post(f"{live.url}/v1/generate", json=BODY, headers=live.headers, timeout=60).json()
    return answer["fallback"] is None and bool(answer["output_text"])


def restarting(live: LiveGateway, bodies: list[dict[str, Any]]) -> bool:
    answer = ready(live)
    if answer.status_code != 503 or answer.json()["engine"]["state"] != "restarting":
        return False
    bodies.append(answer.json())
    return True


def engine_state(live: LiveGateway) -> dict[str, Any]:
    engine: dict[str, Any] = ready(live).json()["engine"]
    return engine


def test_a_dead_or_hung_engine_comes_back_by_itself_until_it_has_died_too_often(tmp_path: Path) -> None:
    with gateway(tmp_path, SLUICE_ENGINE__MAX_RESTARTS_PER_HOUR="2") as live:
        assert answers(live)
        counted = live.metric("vllm:prefix_cache_queries_total")
        for number, (sent, reason) in enumerate(
            ((signal.SIGKILL, "exited"), (signal.SIGSTOP, "stopped")), start=1
        ):
            pid = live.engine_pid()
            os.kill(pid, sent)
            bodies: list[dict[str, Any]] = []  # stored: the engine may be back before the next request
            noticed_s = until(lambda bodies=bodies: restarting(live, bodies), 60.0)  # type: ignore[misc]
            assert noticed_s < 15, "0.75 s when idle; engine.hang_seconds are 30"
            [body] = bodies
            assert body["engine"]["restarts_last_hour"] == number
            assert body["engine"]["ready_in_seconds"] is not None
            assert body["checks"]["workers_ready"] is False
            assert httpx.get(f"{live.url}/ping", timeout=60).status_code == 200
            assert live.metric("vllm:prefix_cache_queries_total") >= counted, "counters never go back"
            until(lambda: ready(live).status_code == 200, BACK_TIMEOUT_S)
            assert not psutil.pid_exists(pid)
            assert answers(live)
            assert live.metric("vllm:prefix_cache_queries_total") > counted
            text = httpx.get(f"{live.url}/metrics", timeout=60).text
            assert f'sluice_engine_restarts_total{{backend="local",reason="{reason}"}} 1.0' in text
            assert 'sluice_engine_state{backend="local",state="ready"} 1.0' in text
        deep = httpx.get(f"{live.url}/health/deep", headers=live.headers, timeout=30).json()
        assert deep["restarts_last_hour"] == 2

        os.kill(live.engine_pid(), signal.SIGKILL)
        until(lambda: engine_state(live)["state"] == "given_up", 60.0)
        body = ready(live).json()
        assert (ready(live).status_code, body["status"]) == (503, "engine_given_up")
        assert (
            'sluice_engine_state{backend="local",state="given_up"} 1.0'
            in httpx.get(f"{live.url}/metrics", timeout=60).text
        )
        until(lambda: "engine given up" in live.log.read_text(), 60.0)
        assert httpx.get(f"{live.url}/ping", timeout=60).status_code == 200
        answer = httpx.post(f"{live.url}/v1/generate", json=BODY, headers=live.headers, timeout=60).json()
        assert answer["fallback"]["reason"] == "engine_dead"
        log = live.log.read_text()
    assert live.process.returncode == 0
    for word in ("engine lost", "engine restarting", "engine restarted", "stopped", "exited"):
        assert word in log


def test_a_sigterm_while_the_engine_loads_again_exits_0_and_leaves_no_process(tmp_path: Path) -> None:
    with gateway(tmp_path) as live:
        old = live.engine_pid()
        os.kill(old, signal.SIGKILL)
        children = psutil.Process(live.process.pid).children
        until(lambda: any(child.pid != old for child in children()), 60.0)
        left = children()
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
        until(lambda: not any(child.is_running() for child in left), 60.0)
    assert "Traceback" not in live.log.read_text()
