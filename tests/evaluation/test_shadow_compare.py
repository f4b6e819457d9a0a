"""A comparison as a run of an experiment tracker."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evaluation.shadow_compare.__main__ import main
from evaluation.shadow_compare.tracking import MlflowTracker, TrackingError, figures, log_report
from gateway.shadow.report import make_report
from tests import fork_server
from tests.shadow.test_report import pairs


@dataclass
class Notebook:
    """A tracker that stores its runs in memory."""

    runs: list[dict[str, Any]] = field(default_factory=list)

    def log(
        self, name: str, *, tags: Mapping[str, str], metrics: Mapping[str, float], files: Mapping[str, str]
    ) -> str:
        self.runs.append({"name": name, "tags": tags, "metrics": metrics, "files": files})
        return f"run-{len(self.runs)}"


def test_a_report_is_one_run_with_figures_the_report_and_the_page() -> None:
    notebook, report = Notebook(), make_report(pairs(40, failed=4))
    assert log_report(report, notebook, as_text=json.dumps(report)) == "run-1"
    [run] = notebook.runs
    assert run["name"] == "haiku beside demo"
    assert run["tags"] == {"sluice.primary": "demo", "sluice.shadow": "haiku"}
    metrics = run["metrics"]
    assert (metrics["pairs"], metrics["compared"]) == (40.0, 36.0)
    assert metrics["check.grounding.primary.mean"] == 1.0
    assert metrics["total_ms.difference.low"] > 0
    assert metrics["judged.tie"] == 20.0
    assert all(isinstance(value, float | int) and math.isfinite(value) for value in metrics.values())
    assert json.loads(run["files"]["shadow.json"]) == report
    assert run["files"]["shadow.html"].startswith("<!doctype html>")


def test_no_pairs_are_a_run_too() -> None:
    assert figures(make_report([])) == {"pairs": 0.0, "compared": 0.0}


def test_without_mlflow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrackingError, match=r"sluice-gateway\[mlflow\]"):
        MlflowTracker("file:/nowhere", "x").log("run", tags={}, metrics={}, files={})


LOGS = """
import json, sys
from evaluation.shadow_compare.tracking import MlflowTracker, TrackingError, log_report
from gateway.shadow.report import make_report
from tests.shadow.test_report import pairs
report = make_report(pairs(40, failed=4))
for uri in sys.argv[1:]:
    try:
        print(log_report(report, MlflowTracker(uri, "shadows"), as_text=json.dumps(report)))
    except TrackingError as error:
        print(error)
"""


def test_mlflow_itself_keeps_the_run_and_its_files_and_an_unreachable_server_is_one_line(
    tmp_path: Path,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        away = f"http://127.0.0.1:{taken.getsockname()[1]}"
        # In a separate process, because MLflow changes much process-wide state.
        done = fork_server.run(
            [sys.executable, "-c", LOGS, away, f"file:{tmp_path}/runs"],
            cwd=tmp_path,
            env={
                **os.environ,
                "MLFLOW_ALLOW_FILE_STORE": "true",
                "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
            },
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    refused, run_id = done.stdout.splitlines()[0], done.stdout.split()[-1]
    assert refused.startswith(f"{away}: ")
    [run] = (tmp_path / "runs").glob(f"*/{run_id}")
    metrics = {path.name: path.read_text().split() for path in (run / "metrics").iterdir()}
    assert set(metrics) == set(figures(make_report(pairs(40, failed=4))))
    assert float(metrics["pairs"][1]) == 40 and float(metrics["check.grounding.primary.mean"][1]) == 1.0
    assert (run / "tags" / "sluice.shadow").read_text() == "haiku"
    assert (run / "tags" / "mlflow.runName").read_text() == "haiku beside demo"
    assert json.loads((run / "artifacts" / "shadow.json").read_text())["pairs"] == 40
    assert (run / "artifacts" / "shadow.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "sluice: no answer"])
def test_what_is_no_report_is_refused_by_name(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    assert main(["--report", str(file)]) == 2
    assert capsys.readouterr().err == f"--report: {file} is not a report of `sluice shadow report --json`\n"
