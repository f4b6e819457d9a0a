"""Build or buy: the worked example is reproduced, and the break-even is where both cost the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ops.cli.main import app
from ops.planning.build_or_buy import Build, Buy, break_even, compare


def test_the_worked_example_of_the_source_is_reproduced() -> None:
    found = compare(Build(), Buy())
    assert found.build_usd_per_day == pytest.approx(168)
    assert found.tokens_per_day == pytest.approx(345.6e6)
    assert found.buy_usd_per_day == pytest.approx(1_512, rel=0.01)
    assert found.ratio == pytest.approx(9, rel=0.01)


@given(
    st.floats(0.05, 1.0),
    st.floats(0, 50_000),
    st.integers(0, 3),
    st.floats(0.1, 20),
    st.floats(0, 1),
)
def test_below_the_break_even_buying_is_cheaper_and_at_it_building_costs_no_more(
    utilization: float, monthly: float, spare: int, output_usd: float, input_share: float
) -> None:
    build = Build(utilization=utilization, usd_per_month=monthly, spare_replicas=spare)
    buy = Buy(output_usd=output_usd, input_share=input_share)
    tokens = break_even(build, buy)
    if tokens is None:
        for replicas in (1, 2, 10, 1_000):
            load = replicas * build.replica_tokens_per_day
            assert build.usd_per_day(load) >= buy.usd_per_day(load) * (1 - 1e-9)
        return
    at = tokens * (1 + 1e-9)
    assert build.usd_per_day(at) <= buy.usd_per_day(at) * (1 + 1e-6)
    assert build.usd_per_day(tokens * 0.999) > buy.usd_per_day(tokens * 0.999) * (1 - 1e-9)


def test_cached_input_makes_what_is_bought_cheaper() -> None:
    assert Buy(cached_usd=1.25, cached_share=0.5).usd_per_million < Buy().usd_per_million


@pytest.mark.parametrize(
    ("build", "buy", "load", "named"),
    [
        (replace(Build(), gpus=0), Buy(), None, "gpus: given 0; allowed: above 0"),
        (replace(Build(), utilization=1.5), Buy(), None, "utilization: given 1.5; allowed: 0 to 1"),
        (Build(), Buy(input_share=-0.1), None, "input_share"),
        (Build(), Buy(output_usd=float("nan")), None, "output_usd"),
        (Build(), Buy(), 0.0, "tokens_per_day"),
    ],
)
def test_a_figure_out_of_its_range_is_named(build: Build, buy: Buy, load: float | None, named: str) -> None:
    with pytest.raises(ValueError, match=named.split(":")[0]) as refused:
        compare(build, buy, load)
    assert named in str(refused.value)


def test_the_command_shows_every_input_and_says_from_when_on_building_pays() -> None:
    shown = CliRunner().invoke(app, ["cost", "--tokens-per-day", "30e6", "--utilization", "0.5"])
    assert shown.exit_code == 0, shown.output
    assert "Building pays off from" in shown.output
    as_json = CliRunner().invoke(app, ["cost", "--json"])
    assert json.loads(as_json.output)["result"]["replicas"] == 1
    never = CliRunner().invoke(app, ["cost", "--gpu-usd-per-hour", "100"])
    assert "never pays" in never.output


def test_the_command_refuses_a_wrong_figure_with_its_name() -> None:
    refused = CliRunner().invoke(app, ["cost", "--utilization", "0"])
    assert refused.exit_code == 2
    assert "utilization" in refused.output
