"""The residency benchmark: both policies get the same requests; heat keeps the most requested adapters."""

from __future__ import annotations

import pytest

from adapters.residency import AdapterDemand
from benchmarks.adapter_residency import NoHeat, Zipf, compare, jain, simulate


def test_heat_finds_more_loaded_than_lru_and_less_than_the_best_fixed_choice() -> None:
    found = compare(50, 5, 4_000, 1.0, 0.02, 0.0)
    lru, heat = found["LRU, begins empty"], found["heat, preloaded"]
    assert lru.hit_rate + 0.05 < heat.hit_rate <= Zipf(50, 1.0, 0).best(5) + 0.02
    assert sum(lru.asked.values()) + lru.full == sum(heat.asked.values()) + heat.full == 4_000


def test_without_heat_the_longest_idle_makes_room() -> None:
    requests = [(float(10 * n), name) for n, name in enumerate("abacab")]
    tally = simulate(requests, NoHeat(), 2, 0.0)
    # c replaces b, then b replaces c: both times a was used more recently.
    assert (tally.hits["a"], tally.hits["b"], tally.hits["c"]) == (2, 0, 0)


def test_what_was_preloaded_is_found() -> None:
    assert simulate([(0.0, "a")], AdapterDemand(), 2, 0.02, preload=["a", "b", "c"]).hit_rate == 1.0


def test_fairness_is_one_when_all_are_equal_and_one_in_n_when_one_has_it_all() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
