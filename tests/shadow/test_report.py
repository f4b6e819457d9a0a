"""Reports over pairs, and the coverage of their intervals."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from accounting.shadow_values import ShadowPair, ShadowSide
from evaluation.shadow_compare.page import page
from gateway.shadow.report import make_report
from gateway.shadow.statistics import bootstrap, quantile, wilson
from ops.cli.shadow import print_report


def pairs(count: int, *, slower_ms: float = 100.0, ungrounded: int = 4, failed: int = 0) -> list[ShadowPair]:
    """Return pairs: every ``ungrounded``-th shadow fails the grounding check; the first ``failed`` have no answer."""
    rng, made = random.Random(7), []
    for number in range(count):
        ms = rng.uniform(200, 400)
        broken = number < failed
        made.append(
            ShadowPair(
                pair_id=f"p{number}",
                generation_id=f"g{number}",
                at=1_700_000_000.0 + number,
                route="shop",
                prompt_version="v1" if number % 2 else "v2",
                intent="<script>" if number % 3 else None,
                primary=ShadowSide(
                    "local",
                    "demo",
                    "stop",
                    chars=100,
                    ttft_ms=ms / 4,
                    total_ms=ms,
                    language="en",
                    checks={"grounding": True},
                ),
                shadow=ShadowSide(
                    "bedrock",
                    "haiku",
                    "length" if number % 5 == 0 else "stop",
                    chars=0 if broken else 150,
                    ttft_ms=ms / 4,
                    total_ms=ms + slower_ms + rng.uniform(-20, 20),
                    cost_nanousd=2_000_000,
                    language="en",
                    checks={"grounding": number % ungrounded != 0},
                    failure="throttled" if broken else None,
                ),
                likeness=None if broken else 0.6,
                judged="shadow" if number % 2 else "tie",
            )
        )
    return made


def test_a_report_has_shares_differences_and_groups() -> None:
    report = make_report(pairs(100, failed=10))
    assert (report["pairs"], report["compared"], report["failures"]) == (100, 90, {"throttled": 10})
    assert (report["primary"], report["shadow"]) == (["demo"], ["haiku"])
    assert [(one["by"], one["value"]) for one in report["groups"]] == [
        (None, None),
        ("prompt_version", "v2"),
        ("prompt_version", "v1"),
        ("intent", "<script>"),
        ("intent", None),
    ]
    whole = report["groups"][0]
    [check] = whole["checks"]
    assert check["primary"]["mean"] == 1.0 and check["shadow"]["mean"] == pytest.approx(68 / 90, abs=1e-3)
    assert check["difference"]["high"] < 0
    numbers = {one["measure"]: one for one in whole["numbers"]}
    total = numbers["total_ms"]["difference"]
    assert total["low"] < total["mean"] < total["high"] and total["low"] > 90 and total["high"] < 110
    assert numbers["ttft_ms"]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert whole["length_ratio"]["mean"] == 1.5 and whole["judged"] == {"shadow": 50, "tie": 50}
    assert {one["shadow"]: one["pairs"] for one in report["finish_reasons"]} == {"stop": 72, "length": 18}
    assert json.loads(json.dumps(report)) == report


def test_two_shadows_and_a_replaced_model_are_not_only_added_together() -> None:
    first, second, third = pairs(60), pairs(40, failed=40), pairs(20)
    second = [replace(one, shadow=replace(one.shadow, backend="gpus", version="llama")) for one in second]
    third = [
        replace(one, adapter_id="ja", shadow=replace(one.shadow, backend="gpus", version="qwen+ja"))
        for one in third
    ]
    groups = make_report([*first, *second, *third])["groups"]
    found = {one["value"]: (one["pairs"], one["answered"]["mean"]) for one in groups if one["by"] == "shadow"}
    assert found == {"bedrock (haiku)": (60, 1.0), "gpus (llama)": (40, 0.0), "gpus (qwen)": (20, 1.0)}
    assert not [one for one in groups if one["by"] == "primary"], "there is one"


def test_a_paired_difference_has_a_narrower_interval_than_its_sides() -> None:
    report = make_report(pairs(200))
    [total] = [one for one in report["groups"][0]["numbers"] if one["measure"] == "total_ms"]
    width = total["difference"]["high"] - total["difference"]["low"]
    # Answers span 200 ms, the differences of pairs 40 ms: a standard error of about 1.6 ms.
    assert 2 < width < 8


def test_too_few_pairs_have_no_interval_and_none_are_no_report() -> None:
    few = make_report(pairs(5))
    assert few["groups"][0]["checks"][0]["difference"]["low"] is None
    none = make_report([])
    assert (none["pairs"], none["groups"], none["failures"]) == (0, [], {})
    assert "No pairs yet" in page(none)


def test_a_report_is_deterministic() -> None:
    assert make_report(pairs(60)) == make_report(pairs(60))


class Page(HTMLParser):
    """Collects the tags of a page and the addresses that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_escapes_every_name() -> None:
    text = page(make_report(pairs(60)))
    found = Page()
    found.feed(text)
    # Times and tokens are drawn as curves, the checks as points.
    assert found.tags.count("svg") == 4 and found.tags.count("polyline") == 6
    assert found.tags.count("circle") == 2
    assert found.loads == [] and "script" not in found.tags
    assert "intent: &lt;script&gt;" in text
    assert not any(
        math.isnan(float(x))
        for point in text.split("points='")[1:]
        for x in point.split("'")[0].replace(",", " ").split()
    )


def test_the_tables_show_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = make_report(pairs(60, failed=3))
    print_report(report)
    shown = capsys.readouterr().out
    assert "3 throttled" in shown
    assert shown.count("shadow minus primary") == len(report["groups"])


def test_wilson_has_its_nominal_coverage() -> None:
    rng, share, inside = random.Random(3), 0.93, 0
    for _ in range(2_000):
        interval = wilson(sum(rng.random() < share for _ in range(40)), 40)
        assert interval.low is not None and interval.high is not None
        inside += interval.low <= share <= interval.high
    assert 0.92 < inside / 2_000 < 0.985
    assert wilson(0, 10).low == 0.0 and wilson(10, 10).high == pytest.approx(1.0)


def test_the_bootstrap_has_its_nominal_coverage_and_leaves_out_what_is_missing() -> None:
    rng, inside = random.Random(5), 0
    for trial in range(60):
        column = [None if rng.random() < 0.2 else rng.gauss(10, 3) for _ in range(60)]
        found = bootstrap({"a": column, "none": [None] * 60}, random.Random(trial), resamples=150)
        assert set(found) == {"a"}
        assert found["a"].low is not None and found["a"].high is not None
        inside += found["a"].low <= 10 <= found["a"].high
    assert 0.87 < inside / 60 <= 1.0


def test_quantiles_lie_between_their_neighbours() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([5.0], 0.99) == 5.0
