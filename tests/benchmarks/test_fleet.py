"""The simulated fleet: its traffic, its events, and its report, on fleets of a few workers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.fleet.__main__ import DATA, Variant, gateways_for, limits_for, main, run_fleet
from benchmarks.fleet.decisions import cost_of
from benchmarks.fleet.simulation import Plan, Result, Simulation
from benchmarks.fleet.traffic import Source, ideal_hits, read_source, traffic
from evaluation.simulator.measures import SimulatedSlo
from evaluation.simulator.profiles import A10G_8B_AWQ

SLO = SimulatedSlo(2.0, 0.1)


@pytest.fixture(scope="module")
def azure() -> Source:
    return read_source("azure", DATA / "azure_llm_conv_2023_2000.csv", 1.0)


@pytest.fixture(scope="module")
def mooncake() -> Source:
    return read_source("mooncake", DATA / "mooncake_synthetic_500.jsonl", 1 / 16)


@pytest.mark.parametrize("workers", [1, 10, 60])
def test_each_worker_brings_as_much_traffic_whatever_the_size(azure: Source, workers: int) -> None:
    requests = traffic(azure, workers, 1.0, 100.0, random.Random(1))
    assert len(requests) / workers == pytest.approx(100, rel=0.35)
    assert [one.number for one in requests] == list(range(len(requests)))
    assert all(0 <= one.at < 100 for one in requests)
    assert requests == sorted(requests, key=lambda one: one.at)


def test_pieces_share_no_prefix_and_hold_whole_conversations(mooncake: Source) -> None:
    one = traffic(mooncake, 1, 1.6, 30.0, random.Random(1))
    many = traffic(mooncake, 12, 1.6, 30.0, random.Random(1))
    roots = {request.units[0] for request in one if request.units}
    assert roots < {request.units[0] for request in many if request.units}
    whole = {request.units[0] % (1 << 24) for request in one if request.units}
    there = [request for request in mooncake.requests if request.units and request.units[0] in whole]
    assert len(there) == sum(bool(request.units) for request in one)
    assert 0 < ideal_hits(many, mooncake.unit_tokens) < sum(request.prompt for request in many)


def run(source: Source, seed: int = 1) -> Result:
    arrivals = traffic(source, 3, 2.0, 8.0, random.Random(seed))
    plan = Plan(3, 2, 1.0, True, 1, limits_for(SLO, A10G_8B_AWQ), seed)
    return Simulation(plan, A10G_8B_AWQ, arrivals).run()


def test_every_request_is_answered_or_refused_and_none_stays_in_flight(azure: Source) -> None:
    result = run(azure)
    assert result.outcomes
    for outcome in result.outcomes:
        assert (outcome.finished_at is None) != (outcome.refused_at is None)
    for front in result.fronts:
        assert front.gate.in_flight == front.gate.queued == 0
        assert sum(seen.load.in_flight for seen in front.seen) == 0


def test_the_same_seed_gives_the_same_fates(azure: Source) -> None:
    first, again, other = run(azure), run(azure), run(azure, seed=2)
    assert first.outcomes == again.outcomes != other.outcomes


@pytest.mark.slow
def test_affinity_finds_more_in_the_caches_of_ten_workers_than_load_alone(mooncake: Source) -> None:
    hits = [
        run_fleet(mooncake, Variant("", 2, 1.0, affinity), 10, rate=1.0, span_s=20.0, slo=SLO, seed=1)
        for affinity in (True, False)
    ]
    assert hits[1].hits < 0.6 * hits[0].hits and hits[0].hits <= hits[0].ideal


def test_one_gateway_serves_a_hundred_workers_and_two_are_the_least_from_ten_on() -> None:
    assert [gateways_for(size) for size in (1, 9, 10, 100, 101, 1000)] == [1, 1, 2, 2, 2, 10]


@pytest.mark.slow
def test_placing_among_many_costs_less_with_a_shortlist() -> None:
    # At least 3 times; the measured factor is 10 and more.
    cost = cost_of(400, requests=200)
    assert 3 * cost.short_p50_us < cost.whole_p50_us


@pytest.mark.slow
def test_the_report_has_a_figure_for_each_size_and_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A report repeats a small fleet for about 1,000 requests; thirty are enough to show that it has all figures.
    monkeypatch.setattr("benchmarks.fleet.__main__.ENOUGH_REQUESTS", 30)
    app, report = Typer(), tmp_path / "fleet.json"
    app.command()(main)
    arguments = ["--sizes", "1,2", "--span", "4", "--load", "0.2", "--no-variants", "--output", str(report)]
    invoked = CliRunner().invoke(app, arguments)
    assert invoked.exit_code == 0, invoked.output
    fleets = json.loads(report.read_text())["fleets"]
    assert {name: list(sizes) for name, sizes in fleets.items()} == {
        "azure": ["1", "2"],
        "mooncake": ["1", "2"],
    }
    assert all(
        one["requests"] > 0 and 0 <= one["attainment"] <= 1 for by in fleets.values() for one in by.values()
    )


def test_sizes_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    app = Typer()
    app.command()(main)
    invoked = CliRunner().invoke(app, ["--sizes", "1,many"])
    assert invoked.exit_code == 2 and "--sizes" in invoked.output
