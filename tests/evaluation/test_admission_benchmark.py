"""The command that compares admission policies reports every policy at every load."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import fork_server

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_comparison_tells_every_policy_at_every_load_and_draws_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.admission_policies", "--quick", "--json"]
    command += ["--plot", str(tmp_path / "plot.png"), "--output", str(tmp_path / "report.json")]
    done = fork_server.run(command, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [one["trace"] for one in report["comparisons"]] == ["azure", "mooncake"]
    for comparison in report["comparisons"]:
        cells = {(row["load"], row["policy"]): row["summary"] for row in comparison["rows"]}
        assert {load for load, _ in cells} == {1.0, 4.0} and len(cells) == 8
        ours, none = cells[4.0, "sluice"], cells[4.0, "none"]
        assert ours["goodput"] > 5 * none["goodput"]
        assert ours["preemptions"] == 0
        assert ours["wasted"] < 0.02 < none["wasted"]


def test_a_trace_that_cannot_be_read_ends_in_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "none.csv"
    command = [sys.executable, "-m", "benchmarks.admission_policies", "--quick", "--azure", str(trace)]
    done = fork_server.run(command, cwd=ROOT)
    assert (done.returncode, done.stderr.strip()) == (1, f"{trace}: No such file or directory")


def test_a_profile_that_does_not_exist_is_refused_with_those_that_do() -> None:
    command = [sys.executable, "-m", "benchmarks.admission_policies", "--profile", "h900"]
    done = fork_server.run(command, cwd=ROOT)
    assert done.returncode == 2
    assert "a10g-8b-awq" in done.stderr
