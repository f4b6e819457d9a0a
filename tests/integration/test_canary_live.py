"""Canaries in real processes: a good one gets the route, a slow one loses it by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from gateway.cli.main import app
from tests.integration.live import ADMIN_KEY, LiveGateway, gateway
from tests.integration.test_routing import ROUTE, until, worker, write_config

PLAN = {"route": ROUTE, "steps": [20, 50, 100], "min_samples": 30, "step_seconds": 0, "window_seconds": 1}


@contextmanager
def callers(lives: list[LiveGateway]) -> Iterator[list[httpx.Response]]:
    """One at each process, each request a session of its own."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def call(live: LiveGateway, number: int) -> None:
        with httpx.Client(headers=live.headers, timeout=30) as client:
            turn = 0
            while not over.wait(0.01):
                turn += 1
                body = {
                    "route": ROUTE,
                    "session_id": f"{number}-{turn}",
                    "messages": [{"role": "user", "content": "hi"}],
                }
                answers.append(client.post(f"{live.url}/v1/generate", json=body))

    threads = [threading.Thread(target=call, args=(live, number)) for number, live in enumerate(lives)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def canary(live: LiveGateway, word: str = "", **body: Any) -> Any:
    url = f"{live.url}/admin/canary{word}"
    answer = httpx.request(
        "POST" if word else "GET", url, json=body or None, headers=live.headers, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["canary"]


def share(live: LiveGateway, backend: str) -> float:
    config = httpx.get(f"{live.url}/admin/routing", headers=live.headers, timeout=60).json()["config"]
    weights = {one["name"]: float(one["weight"]) for one in config["routes"][ROUTE]["backends"]}
    return weights[backend]


@contextmanager
def gateways(folder: Path, count: int) -> Iterator[list[LiveGateway]]:
    """Processes that share a state store, with one worker under two names and faults that can be switched on."""
    with ExitStack() as stack:
        file = write_config(folder, stack.enter_context(worker()))
        found = []
        for number in range(count):
            own = folder / f"gateway-{number}"
            own.mkdir()
            env: dict[str, Any] = {
                "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
                "SLUICE_CHAOS__ENABLED": "true",
            }
            found.append(stack.enter_context(gateway(own, config=file, **env)))
        yield found


def test_a_good_canary_gets_the_route_and_a_slow_one_loses_it_by_itself(tmp_path: Path) -> None:
    with gateways(tmp_path, 2) as lives, callers(lives) as answers:
        one, other = lives
        assert canary(one, "/start", backend="b", **PLAN)["phase"] == "running"
        assert share(one, "b") == 20.0
        until(lambda: canary(other)["phase"] == "done", 40)
        until(lambda: share(one, "b") == share(other, "b") == 100.0)
        status = ["canary", "status", "--url", other.url, "--key", ADMIN_KEY]
        told = CliRunner().invoke(app, status)
        assert told.exit_code == 0 and "done" in told.output, told.output

        for live in lives:
            rules = {"faults": [{"backend": "a", "kind": "slow", "delay_ms": 400}]}
            switched = httpx.post(f"{live.url}/admin/chaos", json=rules, headers=live.headers, timeout=60)
            assert switched.status_code == 200, switched.text
        command = ["canary", "start", ROUTE, "a", "--steps", "20,100", "--min-samples", "1000"]
        more = ["--window-seconds", "1", "--yes", "--url", other.url, "--key", ADMIN_KEY]
        started = CliRunner().invoke(app, [*command, *more])
        assert started.exit_code == 0 and "running at 20 %" in started.output, started.output
        until(lambda: canary(one)["phase"] == "rolled_back", 40)
        until(lambda: share(one, "a") == share(other, "a") == 0.0)
        ended = canary(one)
        assert ended["reason"].startswith("ttft: ") and ended["canary_requests"] < 200, ended
        audit = httpx.get(f"{one.url}/admin/audit", headers=one.headers, timeout=60).json()["entries"]
        assert audit[0]["action"] == "canary.rollback" and ended["reason"] in audit[0]["comment"]
        assert (
            "sluice_canary_percent" in httpx.get(f"{one.url}/metrics", headers=one.headers, timeout=60).text
        )
        assert {answer.status_code for answer in answers} == {200}
