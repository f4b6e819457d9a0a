"""``sluice chaos`` as an operator runs it: against its own gateway, and against a running one."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests import fork_server
from tests.integration.live import ADMIN_KEY, ROOT, environment, gateway


def run(folder: Path, scenario: dict[str, Any], *words: str, **env: str) -> tuple[int, dict[str, Any], str]:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump({"about": "a test", **scenario}))
    command = [sys.executable, "-m", "ops.cli", "chaos", str(path), "--json", *words]
    done = fork_server.run(command, cwd=ROOT, env=environment({}) | env, timeout=500)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.timeout(600)
def test_a_killed_engine_under_streams_of_a_gateway_of_its_own_behind_a_proxy(tmp_path: Path) -> None:
    code, report, output = run(
        tmp_path,
        {
            "start": {"bedrock": True},
            "load": {"streams": 4, "whole": 1},
            "faults": [{"after_tokens": 3, "do": {"kill": "engine"}}],
            "settle_s": 75,
        },
        "--start",
        http_proxy="http://127.0.0.1:9",
    )
    assert code == 0, output
    assert report["ok"] and [fault["label"] for fault in report["faults"]] == ["kill engine"]
    assert len(report["requests"]) == 5
    assert any("engine" in seen["failing"] for seen in report["readiness"]), "Bedrock keeps the gateway ready"
    assert report["readiness"][-1]["failing"] == []
    for request in report["requests"]:
        assert request["verdict"] in (("resumed", "fallback", "whole") if request["met"] else ("whole",))
        assert request["rows"] == 1 and request["billed"] == request["tokens"]
    met = [request["verdict"] for request in report["requests"] if request["met"] == ["kill engine"]]
    # On a busy machine the engine may have generated all of one answer before it is gone.
    assert len(met) >= 3 and met.count("whole") <= 1
    assert report["at_rest"] is True and report["before"]["children"] == report["after"]["children"]


@pytest.mark.timeout(600)
def test_injected_faults_of_a_gateway_that_is_there(tmp_path: Path) -> None:
    faults = [{"backend": "local", "kind": "nan_output", "every": 2}]
    scenario = {
        "load": {"streams": 3, "whole": 1, "rounds": 2},
        "faults": [{"at_s": 0, "do": {"inject": faults}}],
    }
    with gateway(tmp_path, SLUICE_CHAOS__ENABLED="true") as live:
        words = ("--url", live.url, "--key", ADMIN_KEY, "--ledger", str(tmp_path / "ledger.db"))
        code, report, output = run(tmp_path, scenario, *words)
        assert code == 0, output
        assert sum(report["verdicts"].values()) == 8
        assert report["verdicts"].keys() <= {"whole", "fallback", "degraded"}, (
            "a retry may meet the fault again"
        )
        assert report["metrics"]["sluice_chaos_faults{backend=local,kind=nan_output}"] >= 4
        assert "FAULTS ARE MADE ON PURPOSE" in live.log.read_text()

        for option in ("--ledger", "--log"):
            lost = (option, str(tmp_path / "none"))
            code, _, output = run(tmp_path, scenario, "--url", live.url, "--key", ADMIN_KEY, *lost)
            assert code == 2 and "cannot be read" in output and "Traceback" not in output

        short = {"load": {"streams": 1, "max_tokens": 4}}
        code, _, output = run(tmp_path, short, "--url", live.url, "--key", ADMIN_KEY)
        assert code == 2 and "longer than load.max_tokens (4)" in output

        killing = {"faults": [{"at_s": 0, "do": {"kill": "engine"}}], "load": {"streams": 1}}
        code, _, output = run(tmp_path, killing, *words)
        assert code == 2 and "--pid" in output

        # A process above other gateways, such as this one, would have all of their engines killed.
        code, _, output = run(tmp_path, killing, *words, "--pid", str(os.getpid()))
        assert code == 2 and f"process {os.getpid()} does not listen on port" in output


class EmptyObjects(BaseHTTPRequestHandler):
    """A server that is no gateway: each path has an empty JSON object."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET


def test_what_cannot_be_run_is_told_in_a_line_and_ends_with_2(tmp_path: Path) -> None:
    code, _, output = run(tmp_path, {"load": {"streams": 1}}, "--url", "http://127.0.0.1:9")
    assert code == 2 and "Traceback" not in output
    assert "http://127.0.0.1:9: no answer (" in output and "is the gateway running there?" in output
    code, _, output = run(tmp_path, {"load": {"streams": 1}}, "--output", str(tmp_path / "none" / "x.json"))
    assert code == 2 and "--output: no folder" in output
    code, _, output = run(tmp_path, {"load": {"streams": 1}}, "--seed", "7")
    assert code == 2 and "--seed: the scenario has no random faults" in output
    code, _, output = run(tmp_path, {"load": {"streams": 1}}, "--start", "--ledger", str(tmp_path / "x.db"))
    assert code == 2 and "--ledger: --start starts a gateway of its own" in output
    with HTTPServer(("127.0.0.1", 0), EmptyObjects) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        code, _, output = run(tmp_path, {"load": {"streams": 1}}, "--url", url)
        server.shutdown()
    assert code == 2 and f"{url}: /ready is not a gateway's; is the gateway running there?" in output
    code, _, output = run(tmp_path, {"lod": {}})
    assert code == 2 and "lod" in output
