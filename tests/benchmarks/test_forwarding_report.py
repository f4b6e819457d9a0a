"""How the forwarding benchmark summarizes its results, and how it starts the gateways."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.forwarding.__main__ import app
from benchmarks.forwarding.gateways import REPOSITORY, Name, NotAvailable, recipe
from benchmarks.forwarding.loops import Result
from benchmarks.forwarding.plot import draw
from benchmarks.forwarding.report import BARS, Report, markdown, print_report, summarize
from benchmarks.forwarding.rounds import LOADS, Turn
from benchmarks.forwarding.workload import ANSWER_TOKENS
from gateway.config.settings import load_settings


def result(
    answers: int, *, cpu_s: float = 0.0, ms: Sequence[float] = (1.0,), dropped: int = 0, failed: int = 0
) -> Result:
    return Result(
        answers=answers, elapsed_s=10.0, cpu_s=cpu_s, rss_bytes=64 * 1024**2, latencies_ms=list(ms),
        first_ms=list(ms), marks=answers * ANSWER_TOKENS, whole=answers, whole_events=answers * ANSWER_TOKENS,
        whole_marks=answers * ANSWER_TOKENS, dropped=dropped, failed=failed, faults=["bad"] * bool(failed),
    )  # fmt: skip


def turn(name: Name, number: int, one: Result, **others: Result) -> Turn:
    return Turn(name, number, {key: others.get(key, one) for key in LOADS})


def test_a_gateway_is_compared_with_no_gateway_of_the_same_round() -> None:
    turns = [
        turn(Name.DIRECT, 0, result(10, ms=[1.0])),
        turn(Name.DIRECT, 1, result(10, ms=[5.0])),
        turn(Name.SLUICE, 0, result(10, ms=[2.0])),
        turn(Name.SLUICE, 1, result(10, ms=[6.0])),
    ]
    direct, sluice = summarize(turns)
    assert sluice.added_slow_ms == sluice.added_fast_ms == sluice.added_first_ms == (1.0, 1.0)
    assert direct.added_fast_ms == (3.0, 3.0), "no gateway's own latency, for comparison"


def test_cpu_is_reported_by_request_and_by_token() -> None:
    turns = [turn(Name.DIRECT, 0, result(10)), turn(Name.SLUICE, 0, result(1_000, cpu_s=0.5))]
    _, sluice = summarize(turns)
    assert (sluice.cpu_ms, sluice.req_per_core, sluice.req_per_s, sluice.busy) == (0.5, 2_000, 100, 0.05)
    assert sluice.paced_per_core == sluice.flood_per_core == 1_000 * ANSWER_TOKENS / 0.5


def test_figures_are_medians_over_the_rounds() -> None:
    turns = [turn(Name.DIRECT, number, result(10)) for number in range(3)]
    turns += [
        turn(Name.NGINX, number, result(100, cpu_s=cpu_s)) for number, cpu_s in enumerate((1.0, 3.0, 2.0))
    ]
    assert summarize(turns)[1].cpu_ms == 20.0


def test_a_load_that_a_gateway_does_not_keep_up_with_has_no_latency() -> None:
    slow = turn(Name.LITELLM, 0, result(10, cpu_s=1), fast=result(10, cpu_s=1, dropped=5))
    report = Report.of([turn(Name.DIRECT, 0, result(10)), slow], "here")
    row = report.rows[1]
    assert row.overloaded == ("fast",) and row.added_fast_ms is None and row.added_slow_ms is not None
    assert "overloaded" in markdown(report)


def test_cpu_time_too_short_to_measure_is_not_reported() -> None:
    row = summarize([turn(Name.DIRECT, 0, result(10)), turn(Name.NGINX, 0, result(10, cpu_s=0.009))])[1]
    assert row.cpu_ms is None and row.paced_per_core is None and row.req_per_core is None


def test_each_bar_says_whether_it_was_met() -> None:
    turns = [
        turn(Name.DIRECT, 0, result(1_000)),
        turn(Name.FASTAPI, 0, result(1_000, cpu_s=0.1, ms=[8.0])),
        turn(Name.LITELLM, 0, result(1_000, cpu_s=5.0)),
        turn(Name.TENSORZERO, 0, result(1_000, cpu_s=0.08)),
        turn(Name.SLUICE, 0, result(1_000, cpu_s=0.11, ms=[8.5])),
        turn(Name.SLUICE_RELAXED, 0, result(1_000, cpu_s=0.5, ms=[11.5])),
        turn(Name.SLUICE_UNSEEN, 0, result(1_000, cpu_s=50.0, ms=[90.0], failed=2)),
    ]
    report = Report.of(turns, "here")
    assert all(bar.verdict(Name.SLUICE, report.rounds).endswith(": met") for bar in BARS)
    assert all(bar.verdict(Name.SLUICE_UNSEEN, report.rounds).endswith(": missed") for bar in BARS)
    verdicts = [bar.verdict(Name.SLUICE_RELAXED, report.rounds) for bar in BARS if bar.relaxed is not None]
    assert verdicts and all(line.endswith(": missed") for line in verdicts), "its bars are lower"
    shown = io.StringIO()
    print_report(Console(file=shown, width=200), report)
    assert "2 answers failed, e.g. bad" in shown.getvalue()
    assert "| 1.1, rounds 1.1 to 1.1 (limit ≤ 2): met |" in markdown(report)


def test_a_bar_compares_the_gateways_of_each_round_and_says_how_far_the_rounds_differ() -> None:
    turns = [
        turn(name, number, result(1_000, cpu_s=cpu_s))
        for name, times in (
            (Name.FASTAPI, (1.0, 2.0, 4.0)),
            (Name.DIRECT, (0.0,) * 3),
            (Name.SLUICE, (1.5, 5.0, 8.8)),
        )
        for number, cpu_s in enumerate(times)
    ]
    rounds = Report.of(turns, "here").rounds
    assert BARS[0].spread(Name.SLUICE, rounds) == pytest.approx((2.2, 1.5, 2.5))
    assert "2.2, rounds 1.5 to 2.5 (limit ≤ 2): missed" in BARS[0].verdict(Name.SLUICE, rounds)
    alone = Report.of(turns[3:], "here").rounds
    assert "not measured" in BARS[0].verdict(Name.SLUICE, alone), "there is no bare proxy in this run"


@pytest.mark.slow
def test_the_plot_is_drawn_even_where_figures_are_missing(tmp_path: Path) -> None:
    turns = [turn(Name.DIRECT, 0, result(10)), turn(Name.NGINX, 0, result(0, ms=()))]
    draw(tmp_path / "plot.png", Report.of(turns, "here"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_saved_report_is_shown_and_drawn_again_without_a_measurement(tmp_path: Path) -> None:
    turns = [turn(Name.DIRECT, 0, result(10)), turn(Name.SLUICE, 0, result(10, cpu_s=1.0))]
    report = Report.of(turns, "a machine")
    saved = tmp_path / "report.json"
    saved.write_text(json.dumps(asdict(report)))
    assert Report.saved(json.loads(saved.read_text())) == report
    shown = CliRunner().invoke(app, ["--saved", str(saved), "--json"])
    assert json.loads(shown.stdout) == json.loads(saved.read_text())


def test_sluice_is_measured_with_a_configuration_that_it_takes(tmp_path: Path) -> None:
    made = recipe(Name.SLUICE, folder=tmp_path, port=1234, worker_port=4321)
    settings = load_settings(tmp_path / "sluice.yaml", {})
    assert settings.auth.enabled and settings.server.port == 1234
    assert made.environment["SLUICE_ADMIN_KEY"]
    assert (REPOSITORY / settings.prompts.folder).is_dir()


@pytest.mark.slow
def test_a_gateway_that_cannot_be_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotAvailable, match="leave it out with --only"):
        recipe(Name.LITELLM, folder=tmp_path, port=1, worker_port=2)


def test_the_command_refuses_a_gateway_that_it_does_not_know() -> None:
    refused = CliRunner().invoke(app, ["--only", "ngnix"])
    assert refused.exit_code == 2 and "ngnix" in refused.output
