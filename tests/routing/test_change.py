"""Weights are shared as documented, and differences name their place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest, UnknownRoute
from gateway.routing.change import ConfigChange, differences, same, with_weight
from gateway.routing.file import RoutingConfig


def config(**weights: float) -> dict[str, Any]:
    return {"routes": {"chat": {"backends": [{"name": n, "weight": w} for n, w in weights.items()]}}}


def weights_of(changed: dict[str, Any]) -> dict[str, float]:
    return {entry["name"]: entry["weight"] for entry in changed["routes"]["chat"]["backends"]}


@pytest.mark.parametrize(
    ("before", "backend", "percent", "after"),
    [
        ({"a": 95, "b": 5}, "b", 25, {"a": 75, "b": 25}),
        ({"a": 90, "b": 10, "c": 0}, "c", 10, {"a": 81, "b": 9, "c": 10}),
        ({"a": 100}, "b", 5, {"a": 95, "b": 5}),
        ({"a": 60, "b": 40}, "b", 100, {"a": 0, "b": 100}),
        ({"a": 0, "b": 0, "c": 100}, "c", 50, {"a": 25, "b": 25, "c": 50}),
        ({"a": 0, "b": 100}, "b", 0, {"a": 100, "b": 0}),
        ({"a": 100}, "a", 100, {"a": 100}),
    ],
)
def test_the_other_backends_share_the_rest_in_proportion_and_equally_when_they_have_nothing(
    before: dict[str, float], backend: str, percent: float, after: dict[str, float]
) -> None:
    given_config = config(**before)
    assert weights_of(with_weight(given_config, "chat", backend, percent)) == pytest.approx(after)
    assert weights_of(given_config) == before, "the configuration itself is left as it was"


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    st.floats(0, 100),
    st.integers(0, 5),
)
def test_whatever_is_set_the_result_is_a_valid_configuration(
    shares: list[float], percent: float, which: int
) -> None:
    total = sum(shares)
    before = config(**{f"b{i}": 100 * share / total for i, share in enumerate(shares)})
    after = with_weight(before, "chat", f"b{which % len(shares)}", percent)
    RoutingConfig.model_validate(after)
    assert weights_of(after)[f"b{which % len(shares)}"] == pytest.approx(percent, abs=1e-3)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UnknownRoute, match="'talk' is not configured; known: chat"):
        with_weight(config(a=100), "talk", "a", 5)
    with pytest.raises(InvalidRequest, match="the other 95 %"):
        with_weight(config(a=100), "chat", "a", 5)


def test_differences_name_their_place_and_defaults_written_out_are_none() -> None:
    before, after = config(a=95, b=5), config(a=100)
    after["routes"]["chat"]["slo"] = {"ttft_ms": 200.0, "total_ms": 900}
    assert differences(before, after) == [
        ConfigChange("routes.chat.backends[a].weight", 95.0, 100.0),
        ConfigChange("routes.chat.backends[b]", {"name": "b", "weight": 5.0}, None),
        ConfigChange("routes.chat.slo.total_ms", 1400.0, 900.0),
    ]
    written = config(a=100)
    written["routes"]["chat"] |= {"fallback": [], "backends": [{"name": "a"}]}
    assert same(written, config(a=100)) and not differences(written, config(a=100))


def test_another_order_of_backends_is_a_difference() -> None:
    assert differences(config(a=50, b=50), config(b=50, a=50)) == [
        ConfigChange("routes.chat.backends", ["a", "b"], ["b", "a"])
    ]
    assert not same({"routes": {"strange": 1}}, config(a=100))
