"""A comparison as a run of an experiment tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from evaluation.shadow_compare.tracking import MlflowTracker, TrackingError, figures, log_report
from gateway.shadow.report import make_report
from tests.shadow.test_report import pairs


@dataclass
class Notebook:
    """A tracker that remembers."""

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


def test_without_mlflow_it_is_told_what_to_install() -> None:
    try:
        import mlflow  # noqa: F401
    except ImportError:
        with pytest.raises(TrackingError, match=r"sluice-gateway\[mlflow\]"):
            MlflowTracker("file:/nowhere", "x").log("run", tags={}, metrics={}, files={})
