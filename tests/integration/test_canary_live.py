"""Canaries in real processes: a good one gets the route, a bad one loses it by itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from ops.cli.main import app
from tests.integration.live import ADMIN_KEY, LiveGateway, gateway
from tests.integration.test_routing import ROUTE, until, write_config

PLAN = {"route": ROUTE, "steps": [20, 50, 100], "min_samples": 30, "step_seconds": 0, "window_seconds": 1}

SHORT = {**PLAN, "steps": [20, 100], "min_samples": 1000}


class Worker(ThreadingHTTPServer):
    """Answers in JSON; ``broken`` names models that answer with prose or with an error instead."""

    daemon_threads = True

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), Answering)


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send(200, "application/json", b'{"data": [{"id": "base-a"}, {"id": "base-b"}]}')

    def do_POST(self) -> None:
        assert isinstance(self.server, Worker)
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        broken = self.server.broken.get(asked["model"])
        if broken == "error":
            self.send(500, "application/json", b'{"error": {"message": "no"}}')
            return
        text = "Here you are: yes." if broken == "prose" else '{"answer": "yes"}'
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        parts: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": asked["model"]}
        events = [f"data: {json.dumps({**head, **part})}\n\n" for part in parts]
        self.send(200, "text/event-stream", "".join([*events, "data: [DONE]\n\n"]).encode())

    def send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: it would be hundreds of lines a second."""


@contextmanager
def worker() -> Iterator[Worker]:
    with Worker() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def callers(lives: list[LiveGateway]) -> Iterator[list[httpx.Response]]:
    """Run one caller per process until the block ends; each request has its own session."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def call(live: LiveGateway, number: int) -> None:
        with httpx.Client(headers=live.headers, timeout=60) as client:
            turn = 0
            while not over.wait(0.01):
                turn += 1
                body = {
                    "route": ROUTE,
                    "session_id": f"{number}-{turn}",
                    "messages": [{"role": "user", "content": "hi"}],
                    "response_format": {"type": "json_object"},
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

    def ask() -> httpx.Response:
        verb = "POST" if word else "GET"
        return httpx.request(verb, url, json=body or None, headers=live.headers, timeout=60)

    answer, give_up_at = ask(), time.monotonic() + 60
    # The previous canary ends when its weights are stored, a moment after its phase says so.
    while answer.status_code == 409 and "wait for its end" in answer.text and time.monotonic() < give_up_at:
        time.sleep(0.1)
        answer = ask()
    assert answer.status_code == 200, answer.text
    return answer.json()["canary"]


def share(live: LiveGateway, backend: str) -> float:
    config = httpx.get(f"{live.url}/admin/routing", headers=live.headers, timeout=60).json()["config"]
    weights = {one["name"]: float(one["weight"]) for one in config["routes"][ROUTE]["backends"]}
    return weights[backend]


@contextmanager
def gateways(folder: Path, count: int, port: int) -> Iterator[list[LiveGateway]]:
    """Run gateways with a common state store, one worker under two names, and faults that can be injected."""
    with ExitStack() as stack:
        file = write_config(folder, f"http://127.0.0.1:{port}/v1")
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


def faults(live: LiveGateway, *rules: dict[str, object]) -> None:
    body = {"faults": list(rules)}
    switched = httpx.post(f"{live.url}/admin/chaos", json=body, headers=live.headers, timeout=60)
    assert switched.status_code == 200, switched.text


def audit(live: LiveGateway) -> Any:
    return httpx.get(f"{live.url}/admin/audit", headers=live.headers, timeout=60).json()["entries"]


def rolled_back(lives: list[LiveGateway], check: str) -> None:
    """Wait until this check has ended the canary of ``a`` everywhere; the audit log has the reason."""
    until(lambda: canary(lives[0])["phase"] == "rolled_back", 120)
    until(lambda: all(share(live, "a") == 0.0 for live in lives))
    ended = canary(lives[0])
    assert ended["reason"].startswith(f"{check}: ") and ended["canary_requests"] < 200, ended
    until(lambda: audit(lives[0])[0]["action"] == "canary.rollback")
    assert ended["reason"] in audit(lives[0])[0]["comment"]
    until(lambda: all(canary(live)["percent"] == 0.0 for live in lives))


def test_a_good_canary_gets_the_route_and_a_bad_one_loses_it_by_itself(tmp_path: Path) -> None:
    with worker() as server, gateways(tmp_path, 2, server.server_port) as lives, callers(lives) as answers:
        one, other = lives
        assert canary(one, "/start", backend="b", **PLAN)["phase"] == "running"
        assert share(one, "b") == 20.0
        until(lambda: (canary(other) or {}).get("phase") == "done", 120)
        until(lambda: canary(other)["percent"] == 100.0)  # recorded, so that the next one may start
        until(lambda: share(one, "b") == share(other, "b") == 100.0)
        status = ["canary", "status", "--url", other.url, "--key", ADMIN_KEY]
        shown = CliRunner().invoke(app, status)
        assert shown.exit_code == 0 and "done" in shown.output, shown.output

        # A slow backend.
        for live in lives:
            faults(live, {"backend": "a", "kind": "slow", "delay_ms": 400})
        # The end of the canary may be recorded later.
        assert ("chaos.replace", "a: slow") in [(entry["action"], entry["target"]) for entry in audit(one)]
        command = ["canary", "start", ROUTE, "a", "--steps", "20,100", "--min-samples", "1000"]
        more = ["--window-seconds", "1", "--yes", "--url", other.url, "--key", ADMIN_KEY]
        started = CliRunner().invoke(app, [*command, *more])
        assert started.exit_code == 0 and "running at 20 %" in started.output, started.output
        rolled_back(lives, "ttft")
        for live in lives:
            faults(live)

        # A backend that answers with prose where JSON was asked for.
        server.broken["base-a"] = "prose"
        assert canary(other, "/start", backend="a", **SHORT)["phase"] == "running"
        rolled_back(lives, "guardrail.shape")
        assert (
            "sluice_canary_percent" in httpx.get(f"{one.url}/metrics", headers=one.headers, timeout=60).text
        )
        assert {answer.status_code for answer in list(answers)} == {200}

        # A backend that answers with errors; there is no fallback here, so callers get them.
        server.broken["base-a"] = "error"
        assert canary(one, "/start", backend="a", **SHORT)["phase"] == "running"
        rolled_back(lives, "error")
        after = len(answers)
        until(lambda: len(answers) > after + 40)
        # Answers to requests in flight at the rollback may come first.
        assert {answer.status_code for answer in answers[-20:]} == {200}
