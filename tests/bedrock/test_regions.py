"""The order of regions, decided without a clock or a network."""

from __future__ import annotations

from gateway.backends.bedrock.transport import MAX_COOL_DOWN_S, Regions


def test_the_preferred_region_comes_first_and_the_others_follow() -> None:
    assert Regions(["a", "b", "c"], 10).order(0.0) == ("a", "b", "c")


def test_a_region_that_failed_is_passed_over_until_it_has_cooled_down() -> None:
    regions = Regions(["a", "b"], 10)
    regions.failed("a", 100.0, None)
    assert regions.order(109.9) == ("b",)
    assert regions.order(110.0) == ("a", "b")


def test_a_region_that_answers_is_used_again_at_once() -> None:
    regions = Regions(["a", "b"], 10)
    regions.failed("a", 100.0, None)
    regions.answered("a")
    assert regions.order(100.0) == ("a", "b")


def test_a_longer_wait_that_the_region_asks_for_is_kept_within_bounds() -> None:
    regions = Regions(["a", "b"], 10)
    regions.failed("a", 0.0, 30.0)
    assert regions.order(29.0) == ("b",)
    regions.failed("a", 0.0, 9999.0)
    assert regions.order(MAX_COOL_DOWN_S) == ("a", "b")


def test_when_all_regions_cool_down_only_the_first_to_be_back_is_asked() -> None:
    regions = Regions(["a", "b"], 10)
    regions.failed("a", 5.0, None)
    regions.failed("b", 1.0, None)
    assert regions.order(6.0) == ("b",)


def test_a_single_region_is_always_asked() -> None:
    regions = Regions(["a"], 10)
    regions.failed("a", 0.0, None)
    assert regions.order(1.0) == ("a",)
