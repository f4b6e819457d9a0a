"""Faults with clear errors: bad models, killed engines, locked databases, signals."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests import fork_server
from tests.integration.live import ROOT, LiveGateway, environment, gateway
from tests.sse import json_events

BODY = {"messages": [{"role": "user", "content": "Recommend something like Vinland Saga"}]}
# The grammar lets no answer end early, so there is always a stream to break.
LONG = {
    "messages": [{"role": "user", "content": "Count for me"}],
    "sampling": {"max_tokens": 400, "temperature": 1.0, "seed": 3},
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "numbers",
            "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 400},
        },
    },
    "stream": True,
}


# Longer than what is generated before the fault, however late the fault comes.
ENDLESS = {
    **LONG,
    "sampling": {"max_tokens": 3000, "temperature": 1.0, "seed": 3},
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "numbers",
            "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 3000},
        },
    },
}


def start_fails(*args: str, **env: str) -> str:
    """Start a gateway that must not start; the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        databases = {
            "SLUICE_STATE__URL": f"sqlite:///{folder}/s.db",
            "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/l.db",
        }
        done = fork_server.run(
            [sys.executable, "-m", "ops.cli", "serve", *args],
            cwd=ROOT,
            env=environment(databases | env),
            timeout=180,
        )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("sluice: ")]
    assert 1 <= len(lines) <= 2, done.stderr
    return lines[0]


def test_truncated_weights_stop_the_start_with_one_line(tmp_path: Path) -> None:
    """One example of a model that the loader refuses; tests/engine/test_loader.py has the others."""
    folder = tmp_path / "broken"
    shutil.copytree(ROOT / "models" / "demo", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert "model.safetensors" in start_fails(SLUICE_ENGINE__MODEL=str(folder))


def test_a_taken_port_and_a_wrong_key_stop_the_start_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in start_fails(SLUICE_SERVER__PORT=str(taken.getsockname()[1]))
    assert "SLUICE_SERVR__PORT" in start_fails(SLUICE_SERVR__PORT="1")
    assert "SLUICE_ADMIN_KEY" in start_fails(SLUICE_ADMIN_KEY="")
    assert "missing.yaml" in start_fails("--config", str(tmp_path / "missing.yaml"))


def test_sigterm_finishes_what_is_in_flight_and_exits_0(tmp_path: Path) -> None:
    # With these settings a stopped engine is not taken for hung.
    patient = gateway(tmp_path, SLUICE_ENGINE__STOPPED_SECONDS="120", SLUICE_SERVER__DRAIN_SECONDS="120")
    with patient as live, httpx.Client(headers=live.headers, timeout=60) as client:
        with client.stream("POST", f"{live.url}/v1/generate", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            # SIGTERM goes to every process, as from systemd: the engine must outlive the drain. It is stopped
            # meanwhile, so that the answer does not end before the test has seen the drain.
            engine = live.engine_pid()
            os.kill(engine, signal.SIGSTOP)
            os.kill(engine, signal.SIGTERM)
            live.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while httpx.get(f"{live.url}/ready", timeout=60).status_code != 503:
                assert time.monotonic() < deadline
            refused = httpx.post(f"{live.url}/v1/generate", json=BODY, headers=live.headers, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            os.kill(engine, signal.SIGCONT)
            events = list(json_events(lines))
        assert events[-1]["type"] == "done" and events[-1]["fallback"] is None
        assert live.process.wait(120) == 0
    rows = sqlite3.connect(tmp_path / "ledger.db").execute("select finish_reason from generations").fetchall()
    assert len(rows) == 1, "the last row was written before the exit"


def test_a_killed_engine_leaves_the_gateway_alive_not_ready_and_still_answering(tmp_path: Path) -> None:
    # No restart, so that the test can look at the dead engine; `test_engine_death.py` has the restarts.
    with gateway(tmp_path, SLUICE_ENGINE__MAX_RESTARTS_PER_HOUR="0") as live:
        with (
            httpx.Client(headers=live.headers, timeout=60) as client,
            client.stream("POST", f"{live.url}/v1/generate", json=ENDLESS) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            os.kill(live.engine_pid(), signal.SIGKILL)
            events = list(json_events(lines))
        assert events[-1]["type"] == "error" and events[-1]["partial"] is True
        assert httpx.get(f"{live.url}/ping", timeout=60).status_code == 200
        ready = httpx.get(f"{live.url}/ready", timeout=60)
        assert ready.status_code == 503 and ready.json()["checks"]["workers_ready"] is False
        answer = httpx.post(f"{live.url}/v1/generate", json=BODY, headers=live.headers, timeout=60).json()
        assert answer["fallback"] == {
            "kind": "degraded_response",
            "reason": "engine_dead",
            "retry_after_ms": answer["fallback"]["retry_after_ms"],
        }
        assert answer["finish_reason"] == "degraded" and answer["output_text"]
        headers = {**live.headers, "Prefer": "sluice-no-fallback"}
        error = httpx.post(f"{live.url}/v1/generate", json=BODY, headers=headers, timeout=60)
        assert (error.status_code, error.json()["error"]["code"]) == (503, "backend_unavailable")


def test_a_locked_ledger_stops_no_answer_and_loses_no_row(live: LiveGateway) -> None:
    def ask(number: int) -> None:
        body = {**BODY, "request_id": f"locked-{number}"}
        answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)
        assert answer.status_code == 200 and answer.json()["fallback"] is None

    def wait_for_rows(count: int) -> None:
        deadline = time.monotonic() + 60
        while lock.execute(select).fetchone()[0] < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    select = "select count(*) from generations where request_id like 'locked-%'"
    lock = sqlite3.connect(live.folder / "ledger.db", isolation_level=None, timeout=60)
    ask(0)
    wait_for_rows(1)
    lock.execute("begin exclusive")
    for number in range(1, 4):
        ask(number)
    lock.execute("rollback")
    wait_for_rows(4)
    lock.close()


def test_a_ledger_that_cannot_be_written_costs_no_answer_and_the_loss_is_counted(tmp_path: Path) -> None:
    nowhere = tmp_path / "not-a-folder"
    nowhere.write_text("a file where a folder should be")
    url = f"sqlite+aiosqlite:///{nowhere}/ledger.db"
    with gateway(
        tmp_path,
        SLUICE_LEDGER__URL=url,
        SLUICE_LEDGER__OUTBOX_ROWS="2",
        SLUICE_LEDGER__DURABILITY="memory",
    ) as live:
        for _ in range(4):
            answer = httpx.post(f"{live.url}/v1/generate", json=BODY, headers=live.headers, timeout=60)
            assert answer.status_code == 200 and answer.json()["fallback"] is None
        assert live.metric("sluice_ledger_outbox_rows") == 2
        text = httpx.get(f"{live.url}/metrics", timeout=60).text
        assert 'sluice_ledger_rows_total{result="lost"} 2.0' in text
    assert "usage rows lost" in live.log.read_text()


def test_doctor_finds_what_is_wrong_and_says_so_by_its_exit_code(tmp_path: Path) -> None:
    def run(**env: str) -> tuple[int, dict[str, object]]:
        settings = {
            "SLUICE_STATE__URL": f"sqlite:///{tmp_path}/s.db",
            "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{tmp_path}/l.db",
        }
        done = fork_server.run(
            [sys.executable, "-m", "ops.cli", "doctor", "--json"],
            cwd=ROOT,
            env=environment({**settings, **env}),
            timeout=180,
        )
        return done.returncode, json.loads(done.stdout)

    code, report = run()
    assert (code, report["ok"]) == (0, True)
    details = {check["check"]: check["detail"] for check in report["checks"]}  # type: ignore[attr-defined]
    assert details["disk"].endswith(f"GiB free in {tmp_path}"), "the ledger's folder, not this one"
    code, report = run(SLUICE_ENGINE__MODEL="models/gone")
    assert code == 1
    wrong = [check for check in report["checks"] if not check["ok"]]  # type: ignore[index]
    assert wrong and all(check["detail"] and check["hint"] for check in wrong)


def test_requests_in_flight_of_the_same_id_are_duplicates(live: LiveGateway) -> None:
    body = {**LONG, "request_id": "twin"}

    def post() -> int:
        return httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60).status_code

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = sorted(pool.map(lambda _: post(), range(4)))
    assert statuses[0] == 200 and statuses[-1] == 409
