"""A whole gateway whose state is in Redis, with Redis killed under it."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.integration.live import LiveGateway, gateway
from tests.state.servers import redis_server

STATE_DOCS = Path(__file__).resolve().parents[2] / "docs" / "state.md"
ASKED = {"messages": [{"role": "user", "content": "Hi."}], "sampling": {"max_tokens": 4}}


def ask(live: LiveGateway, key: str | None = None) -> httpx.Response:
    headers = live.headers if key is None else {**live.headers, "Idempotency-Key": key}
    return httpx.post(f"{live.url}/v1/generate", json=ASKED, headers=headers, timeout=30.0)


def wait_for_store(live: LiveGateway, up: float) -> None:
    deadline = time.monotonic() + 60
    while live.metric("sluice_state_store_up") != up:
        assert time.monotonic() < deadline, live.log.read_text()
        time.sleep(0.05)


def test_a_gateway_serves_on_while_its_redis_is_away_and_keeps_its_state_there(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", password="s3cret") as server:
        settings = {"SLUICE_STATE__URL": server.url, "SLUICE_STATE__CACHE_DIR": str(tmp_path / "copies")}
        with gateway(tmp_path, **settings) as live:
            first, again = ask(live, "k"), ask(live, "k")
            assert first.status_code == again.status_code == 200 and first.content == again.content
            assert again.headers["x-idempotent-replay"] == "true"
            with redis.Redis.from_url(server.url) as client:
                names = sorted(key.decode() for key in client.scan_iter())
            assert "sluice:{default}:stream:prompts.published" in names
            assert all(name.startswith("sluice:{default}:") for name in names)
            listed = httpx.get(f"{live.url}/admin/prompts", headers=live.headers, timeout=60).json()
            assert all(one["published_at"] for one in listed["prompts"])

            server.kill()
            wait_for_store(live, 0.0)
            assert ask(live).status_code == 200
            assert ask(live, "k").status_code == 503
            ready = httpx.get(f"{live.url}/ready", timeout=60)
            assert ready.status_code == 200 and ready.json()["checks"]["state_store"] is True

            server.start()
            wait_for_store(live, 1.0)
            assert ask(live, "k").content == first.content
        log = live.log.read_text()
        assert "state store is unreachable" in log and "state store is back" in log and "s3cret" not in log


def test_a_gateway_needs_no_more_rights_in_redis_than_are_documented(tmp_path: Path) -> None:
    [rights] = [line for line in STATE_DOCS.read_text().splitlines() if "ACL SETUSER" in line]
    with redis_server(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as client:
        client.execute_command(*rights.replace("PASSWORD", "s3cret").split())
        url = server.url.replace("redis://", "redis://sluice:s3cret@")
        settings = {"SLUICE_STATE__URL": url, "SLUICE_STATE__CACHE_DIR": str(tmp_path / "copies")}
        with gateway(tmp_path, **settings, SLUICE_RESPONSE_CACHE__URL=url) as live:
            limits = {"requests_per_minute": 5, "tokens_per_minute": 9_999}
            asked = {"tenant": "t", "role": "caller", "limits": limits}
            made = httpx.post(f"{live.url}/admin/keys", json=asked, headers=live.headers, timeout=60).json()
            headers = {"authorization": f"Bearer {made['key']}", "idempotency-key": "k"}
            for _ in range(2):
                answer = httpx.post(f"{live.url}/v1/generate", json=ASKED, headers=headers, timeout=60)
                assert answer.status_code == 200, answer.text
            assert answer.headers["x-idempotent-replay"] == "true"
            time.sleep(1.0)
        assert client.execute_command("ACL LOG") == []


def fleet_when(live: LiveGateway, gone: list[bool]) -> list[dict[str, Any]]:
    """Return the live view's gateways, this one first, once their ``gone`` flags are the expected ones."""
    deadline = time.monotonic() + 120
    with httpx.stream("GET", f"{live.url}/console/live", headers=live.headers, timeout=60) as events:
        for line in events.iter_lines():
            if not line.startswith("data: "):
                continue
            shown = json.loads(line.removeprefix("data: "))
            found = sorted(shown["fleet"], key=lambda one: one["gateway"] != shown["gateway"])
            if [one["gone"] for one in found] == gone:
                return found
            assert time.monotonic() < deadline, found
    raise AssertionError(live.log.read_text())


def two_gateways(stack: ExitStack, folder: Path, url: str) -> list[LiveGateway]:
    """Two gateways on one Redis; the stack stops them."""
    gateways = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        settings = {"SLUICE_STATE__URL": url, "SLUICE_STATE__CACHE_DIR": str(folder / name)}
        gateways.append(stack.enter_context(gateway(folder / name, **settings)))
    return gateways


def test_the_console_shows_the_gateways_of_one_redis_and_the_one_that_was_killed(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, ExitStack() as stack:
        gateways = two_gateways(stack, tmp_path, server.url)
        one, two = gateways
        assert ask(two).status_code == 200
        there = fleet_when(one, [False, False])
        assert there[0]["gateway"] != there[1]["gateway"]
        assert there[1]["requests_per_second"] > 0 == there[0]["requests_per_second"]
        with redis.Redis.from_url(server.url) as client:
            assert not [key for key in client.scan_iter() if b"console" in key]  # nothing is stored in Redis
        two.process.kill()
        here, gone = fleet_when(one, [False, True])
        assert gone["gateway"] == there[1]["gateway"] and there[1]["at"] <= gone["at"] < here["at"]


def test_of_concurrent_repeats_at_two_gateways_one_runs_and_a_killed_gateways_claim_ends(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path / "redis") as server, ExitStack() as stack:
        gateways = two_gateways(stack, tmp_path, server.url)
        one, two = gateways
        pool = stack.enter_context(ThreadPoolExecutor(8))
        answers = [done.result() for done in [pool.submit(ask, live, "both") for live in gateways * 4]]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        assert sum("x-idempotent-replay" not in answer.headers for answer in answers) == 1

        client = stack.enter_context(redis.Redis.from_url(server.url))
        long = {**ASKED, "sampling": {"max_tokens": 400}}
        headers = {**one.headers, "Idempotency-Key": "killed"}
        deadline = time.monotonic() + 60
        known = set(client.scan_iter("*reply-claim*"))
        pool.submit(httpx.post, f"{one.url}/v1/generate", json=long, headers=headers, timeout=60.0)
        while not set(client.scan_iter("*reply-claim*")) - known:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        one.process.send_signal(signal.SIGSTOP)  # it does not end the request
        other = {**two.headers, "Idempotency-Key": "killed"}
        conflict = httpx.post(f"{two.url}/v1/generate", json=ASKED, headers=other, timeout=60.0)
        one.process.kill()
        assert conflict.json()["error"]["code"] == "idempotency_conflict"
        while (taken := ask(two, "killed")).status_code == 409:
            assert time.monotonic() < deadline, taken.text
            time.sleep(0.2)
        assert taken.status_code == 200 and "x-idempotent-replay" not in taken.headers
