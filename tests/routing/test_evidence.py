"""The evidence of a canary's windows: none without a difference, and soon much against a bad canary."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.evidence import ALTERNATIVES, Evidence, EvidenceWindow, log_ratios

TOLERANCE = 1.25


def chances(bad: int, canary: int, baseline: int, odds: float) -> dict[int, float]:
    """Return the probability of each number of bad requests on the canary, given the total of bad ones."""
    found = {
        k: math.comb(canary, k) * math.comb(baseline, bad - k) * odds**k
        for k in range(max(0, bad - baseline), min(bad, canary) + 1)
    }
    return {k: chance / sum(found.values()) for k, chance in found.items()}


@st.composite
def margins(draw: st.DrawFn) -> tuple[int, int, int]:
    canary, baseline = draw(st.integers(1, 12)), draw(st.integers(1, 30))
    return draw(st.integers(1, canary + baseline - 1)), canary, baseline


@given(margins(), st.floats(0.05, TOLERANCE))
def test_the_expected_ratio_is_at_most_1_for_every_tolerable_canary(
    margin: tuple[int, int, int], odds: float
) -> None:
    bad, canary, baseline = margin
    for i in range(len(ALTERNATIVES)):
        mean = math.fsum(
            chance
            * math.exp(log_ratios(EvidenceWindow(k, canary, bad - k, baseline), TOLERANCE, ALTERNATIVES)[i])
            for k, chance in chances(bad, canary, baseline, odds).items()
        )
        assert mean <= 1 + 1e-9
        if odds == TOLERANCE:
            assert math.isclose(mean, 1, rel_tol=1e-9)


@given(st.lists(margins(), max_size=3))
def test_the_mean_stays_at_most_1_over_several_windows(sizes: list[tuple[int, int, int]]) -> None:
    paths = [(1.0, Evidence())]
    for bad, canary, baseline in sizes:
        paths = [
            (so_far * chance, evidence.seen(EvidenceWindow(k, canary, bad - k, baseline), TOLERANCE))
            for so_far, evidence in paths
            for k, chance in chances(bad, canary, baseline, TOLERANCE).items()
        ]
        mean = math.fsum(so_far * math.exp(evidence.log_e) for so_far, evidence in paths)
        assert math.isclose(mean, 1, rel_tol=1e-6)


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from(("none", "all", "canary", "baseline")))
def test_a_window_that_cannot_tell_the_sides_apart_changes_nothing(
    canary: int, baseline: int, kind: str
) -> None:
    windows = {
        "none": EvidenceWindow(0, canary, 0, baseline),
        "all": EvidenceWindow(canary, canary, baseline, baseline),
        "canary": EvidenceWindow(0, 0, baseline // 2, baseline),
        "baseline": EvidenceWindow(canary // 2, canary, 0, 0),
    }
    assert Evidence().seen(windows[kind], TOLERANCE) == Evidence()


def test_a_long_good_time_does_not_delay_the_evidence_against_a_canary_that_turns_bad() -> None:
    evidence = Evidence()
    for _ in range(500):
        evidence = evidence.seen(EvidenceWindow(0, 20, 10, 200), TOLERANCE)
    assert evidence.log_e < 0
    windows = 0
    while evidence.log_e < math.log(1_000):
        evidence = evidence.seen(EvidenceWindow(10, 20, 10, 200), TOLERANCE)
        windows += 1
    assert windows <= 2
