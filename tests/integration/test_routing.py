"""Routing revisions in real processes: changed under load, seen by all, and what happens without the store."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from typer.testing import CliRunner

from gateway.routing.rank import draw
from ops.cli.main import app
from tests import fork_server
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, environment, gateway
from tests.state.servers import free_port, redis_server

ROUTE = "chat"
BASE_RESERVE = 100


def routing(a: float, number: int = 0) -> dict[str, Any]:
    """A configuration that each answer identifies by its ``reserve``."""
    backends = [{"name": "a", "weight": a}, {"name": "b", "weight": 100 - a}]
    return {"routes": {ROUTE: {"backends": backends, "fallback": [], "reserve": BASE_RESERVE + number}}}


@contextmanager
def worker() -> Iterator[str]:
    """The benchmark's fake worker: it answers at once."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.forwarding.worker", str(port), "base-a", "base-b"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200, 120)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@contextmanager
def gateways(folder: Path, count: int, *, state: str | None = None) -> Iterator[list[LiveGateway]]:
    """Run gateways with a common state store in front of one worker under two names."""
    with ExitStack() as stack:
        url = stack.enter_context(worker())
        file = write_config(folder, url)
        found = []
        for number in range(count):
            own = folder / f"gateway-{number}"
            own.mkdir()
            env = {"SLUICE_STATE__URL": state or f"sqlite:///{folder}/state.db"}
            if state is not None:
                env["SLUICE_STATE__CACHE_DIR"] = str(own / "copies")
            found.append(stack.enter_context(gateway(own, config=file, **env)))
        yield found


def write_config(folder: Path, url: str) -> Path:
    settings = {
        "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
        "backends": {
            name: {
                "kind": "openai",
                "base_urls": [url],
                "model": f"base-{name}",
                "metrics_path": None,
                "probe_timeout_seconds": 30,
            }
            for name in ("a", "b")
        },
        "routing": {"file": str(folder / "routing.yaml")},
    }
    (folder / "routing.yaml").write_text(yaml.safe_dump(routing(100)))
    (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sluice.yaml"


def until(true: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if true():
                return
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def call(live: LiveGateway, method: str, path: str = "", **body: Any) -> httpx.Response:
    return httpx.request(
        method, f"{live.url}/admin/routing{path}", json=body or None, headers=live.headers, timeout=60
    )


def done(live: LiveGateway, method: str, path: str = "", **body: Any) -> dict[str, Any]:
    response = call(live, method, path, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def revision(live: LiveGateway) -> int:
    number: int = done(live, "GET")["revision"]
    return number


@contextmanager
def load(lives: list[LiveGateway]) -> Iterator[list[tuple[str, httpx.Response]]]:
    """Run one caller per process until the block ends; all use the same 40 sessions."""
    answers: list[tuple[str, httpx.Response]] = []
    over = threading.Event()

    def caller(live: LiveGateway) -> None:
        with httpx.Client(headers=live.headers, timeout=60) as client:
            turn = 0
            while not over.is_set():
                turn += 1
                session = f"session-{turn % 40}"
                body = {
                    "route": ROUTE,
                    "session_id": session,
                    "messages": [{"role": "user", "content": "hi"}],
                }
                answers.append((session, client.post(f"{live.url}/v1/generate", json=body)))

    threads = [threading.Thread(target=caller, args=(live,)) for live in lives]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def settle(answers: list[Any], more: int = 60) -> None:
    wanted = len(answers) + more
    until(lambda: len(answers) >= wanted, 60)


def check(
    answers: list[tuple[str, httpx.Response]], weights: Mapping[int, list[tuple[str, float]]]
) -> Counter[int]:
    """Check that each answer is from the backend that its revision draws; count answers by revision."""
    seen: Counter[int] = Counter()
    for session, response in answers:
        assert response.status_code == 200, response.text
        answer = response.json()
        number = answer["budget"]["generation_reserve"] - BASE_RESERVE
        weighed = [entry for entry in weights[number] if entry[1] > 0]
        assert answer["backend_version"] == f"base-{draw(ROUTE, session, weighed)}"
        seen[number] += 1
    return seen


def test_changes_under_load_fail_no_request_none_sees_two_revisions_and_a_locked_store_refuses_clearly(
    tmp_path: Path,
) -> None:
    with gateways(tmp_path, 2) as lives:
        one, other = lives
        weights = {number: [("a", a), ("b", 100 - a)] for number, a in enumerate((100.0, 50.0, 5.0, 75.0))}
        with load(lives) as answers:
            settle(answers)
            for number in (1, 2, 3):
                made = done(one, "PUT", config=routing(weights[number][0][1], number), comment="step")
                assert made["revision"] == number + 1 == revision(one), "in force when the answer comes"
                until(lambda: revision(other) == revision(one), 60)
                settle(answers)
            assert done(other, "POST", "/rollback")["config"] == routing(5.0, 2)
            with contextlib.closing(sqlite3.connect(tmp_path / "state.db", timeout=60)) as lock:
                lock.execute("BEGIN EXCLUSIVE")
                refused = call(one, "PUT", config=routing(50, 9))
                settle(answers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "backend_unavailable")
            assert (
                "(locked); requests are served as before; nothing was changed"
                in refused.json()["error"]["message"]
            )
        seen = check(answers, weights)
        assert set(seen) == {0, 1, 2, 3}
        until(lambda: one.metric("sluice_routing_revision") == 5)
        assert one.metric("sluice_routing_behind") == 0

        late = call(one, "PUT", config=routing(1), expected_revision=4)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "revision_conflict")
        wrong = call(one, "PUT", config={"routes": {ROUTE: {"backends": [{"name": "mars"}]}}})
        assert wrong.status_code == 422
        assert "config: routes.chat.backends[0].name: unknown 'mars'" in wrong.json()["error"]["message"]
        assert (
            call(one, "POST", "/promote", route="x", backend="a").json()["error"]["code"] == "unknown_route"
        )
        assert call(one, "POST", "/rollback", to=77).status_code == 422
        assert call(one, "GET", "/history?limit=0").status_code == 422
        assert httpx.get(f"{one.url}/admin/routing", timeout=60).status_code == 401
        step = done(one, "POST", "/weights", route=ROUTE, backend="b", percent=20, comment="canary")
        assert step["config"]["routes"][ROUTE]["backends"] == [
            {"name": "a", "weight": 80}, {"name": "b", "weight": 20}
        ]  # fmt: skip
        [newest, *_] = done(one, "GET", "/history?limit=2")["revisions"]
        assert (newest["revision"], newest["comment"], newest["author"]) == (6, "canary", "bootstrap")
        assert done(one, "GET", "/diff?a=5&b=6")["changes"][0] == {
            "path": "routes.chat.backends[a].weight", "before": 5.0, "after": 80.0
        }  # fmt: skip
        audit = httpx.get(f"{one.url}/admin/audit?limit=3", headers=one.headers, timeout=60).json()["entries"]
        assert audit[0]["action"] == "routing.weights" and audit[0]["result"] == "revision 6"
        assert audit[1]["result"].startswith("refused: ")
        commands(one)


def commands(live: LiveGateway) -> None:
    """Run the commands of `sluice routes`; the one that asks runs in a process with a terminal."""
    env = environment({"SLUICE_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "200"})

    def sluice(*words: str, code: int = 0) -> str:
        found = CliRunner().invoke(app, [*words, "--url", live.url], env=env)
        assert found.exit_code == code, found.output
        return found.output

    assert "valid; nothing was changed" in sluice("routes", "promote", ROUTE, "b", "--dry-run")
    promoted = json.loads(sluice("routes", "promote", ROUTE, "b", "-m", "all of it", "--json"))
    assert promoted["comment"] == "all of it"
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"n\n")
    asked = fork_server.run(
        [sys.executable, "-m", "ops.cli", "routes", "rollback", "--url", live.url],
        cwd=ROOT,
        stdin=terminal,
        env=env,
    )
    assert asked.returncode == 1, "at a terminal it shows and asks"
    assert "rollback?" in asked.stderr and "backends[b].weight" in asked.stdout
    assert revision(live) == promoted["revision"]
    assert "revision 8 is in force" in sluice("routes", "rollback", "--yes")
    file = live.folder / "next.yaml"
    text = yaml.safe_dump(routing(40))
    file.write_text(text + text)
    assert "the key 'routes' is given twice" in sluice("routes", "apply", str(file), code=1)
    file.write_text(text)
    assert "revision 9 is in force" in sluice("routes", "apply", str(file))
    assert "backends[b].weight" in sluice("routes", "set-weight", ROUTE, "b", "5")
    assert "rollback to revision" in sluice("routes", "history")
    assert "routing.promote" in sluice("audit")
    assert "95" in sluice("routes", "show")
    assert "409 revision_conflict" in sluice(
        "routes", "set-weight", ROUTE, "b", "6", "--expected", "2", code=1
    )


def test_a_killed_redis_refuses_changes_serving_goes_on_and_all_agree_when_it_is_back(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis, gateways(tmp_path, 2, state=redis.url) as lives:
        one, other = lives
        with load(lives) as answers:
            assert done(one, "PUT", config=routing(50, 1))["revision"] == 2
            until(lambda: revision(other) == 2, 60)
            redis.kill()
            refused = call(other, "POST", "/weights", route=ROUTE, backend="b", percent=5)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "backend_unavailable")
            settle(answers)
            redis.start()
            until(lambda: call(other, "PUT", config=routing(20, 2)).status_code == 200, 60)
            until(lambda: revision(one) == revision(other) == 3, 60)
            settle(answers)
        weights = {number: [("a", a), ("b", 100 - a)] for number, a in enumerate((100.0, 50.0, 20.0))}
        assert check(answers, weights)[2] > 0


def test_a_wrong_file_stops_the_first_start_with_one_line_per_fault(tmp_path: Path) -> None:
    file = write_config(tmp_path, "http://127.0.0.1:9/v1")
    (tmp_path / "routing.yaml").write_text("routes: {}")
    fresh = {
        "SLUICE_STATE__URL": f"sqlite:///{tmp_path}/fresh.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{tmp_path}/ledger.db",
    }
    stopped = fork_server.run(
        [sys.executable, "-m", "ops.cli", "serve", "--config", str(file)], cwd=ROOT, env=environment(fresh)
    )
    assert stopped.returncode == 1
    assert "routing.yaml: routes: allowed: 1 item or more; given: an object" in stopped.stderr
    assert not stopped.stdout, "the banner comes when the configuration is in force"
