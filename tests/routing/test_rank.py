"""Ranking is a pure function: sticky, split as configured, only of backends that can serve the request."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from adapters.selection import stable_fraction
from gateway.backends.port import BackendState
from gateway.contracts.features import Feature
from gateway.routing.file import RouteConfig, WeightedBackend
from gateway.routing.rank import draw, rank
from gateway.routing.revision import Route
from tests.scripted import ScriptedBackend


def route(*weights: tuple[str, float]) -> Route:
    return Route("r", RouteConfig(backends=[WeightedBackend(name="a")]), weights)


def backends(**states: BackendState) -> dict[str, ScriptedBackend]:
    return {name: ScriptedBackend(name, state=state) for name, state in states.items()}


READY, DEAD = BackendState.READY, BackendState.DEAD


@given(st.text(), st.text())
def test_the_fraction_depends_on_its_parts_alone_and_lies_in_0_to_1(a: str, b: str) -> None:
    assert stable_fraction(a, b) == stable_fraction(a, b)
    assert 0 <= stable_fraction(a, b) < 1


@given(st.text(min_size=1))
def test_a_session_always_draws_the_same_backend(session: str) -> None:
    fleet = backends(a=READY, b=READY)
    ranked = [
        rank(route(("a", 50), ("b", 50)), sticky_key=session, asked=frozenset(), backends=fleet)
        for _ in range(3)
    ]
    assert len({r.candidates[0].name for r in ranked}) == 1


def test_the_split_of_many_sessions_is_within_the_binomial_interval() -> None:
    fleet, n, p = backends(a=READY, b=READY), 20_000, 0.05
    split = route(("a", 95), ("b", 5))
    hits = sum(
        rank(split, sticky_key=f"s{i}", asked=frozenset(), backends=fleet).candidates[0].name == "b"
        for i in range(n)
    )
    assert abs(hits - n * p) < 4 * math.sqrt(n * p * (1 - p))


def test_a_backend_of_weight_0_is_no_candidate() -> None:
    ranked = rank(
        route(("a", 100), ("b", 0)), sticky_key="s", asked=frozenset(), backends=backends(a=READY, b=READY)
    )
    assert [backend.name for backend in ranked.candidates] == ["a"]


class Silent(ScriptedBackend):
    generates = False


def test_a_chat_that_names_no_model_goes_to_a_backend_that_generates() -> None:
    fleet = {**backends(a=READY, b=READY, c=READY), "v": Silent("v")}
    for chosen, weights, fallback in (
        ("a", (("v", 100), ("a", 1)), ()),
        ("a", (("v", 100), ("a", 0), ("b", 0)), ()),
        ("b", (("v", 100),), ("response_cache", "b", "a")),
        ("v", (("v", 100),), ()),  # the backend refuses the chat and gives the reason
    ):
        named = replace(route(*weights), fallback=fallback)
        ranked = rank(named, sticky_key="s", asked=frozenset(), backends=fleet)
        assert [one.name for one in ranked.candidates] == [chosen], (weights, fallback)
    pinned = rank(route(("v", 50), ("a", 50)), sticky_key="s", asked=frozenset(), backends=fleet, pinned="v")
    assert [one.name for one in pinned.candidates] == ["v"]


def test_a_backend_that_lacks_a_feature_is_passed_over_and_told() -> None:
    fleet = backends(a=READY, b=READY)
    fleet["a"].features = frozenset()
    asked = frozenset({Feature.LORA})
    ranked = rank(route(("a", 99), ("b", 1)), sticky_key="s", asked=asked, backends=fleet)
    assert [backend.name for backend in ranked.candidates] == ["b"]
    assert ranked.unable == MappingProxyType({"a": asked})


def test_a_ready_backend_goes_before_a_dead_one_whatever_was_drawn() -> None:
    fleet = backends(a=DEAD, b=READY)
    ranked = rank(route(("a", 100), ("b", 0)), sticky_key="s", asked=frozenset(), backends=fleet)
    assert ranked.candidates[0].name == "a", "the only one with weight"
    ranked = rank(route(("a", 99), ("b", 1)), sticky_key="s", asked=frozenset(), backends=fleet)
    assert [backend.name for backend in ranked.candidates] == ["b", "a"]


def test_a_backend_whose_workers_asked_for_a_pause_goes_after_one_that_takes_requests() -> None:
    class Pausing(ScriptedBackend):
        pauses = True

    fleet = {"a": Pausing("a"), **backends(b=READY)}
    ranked = rank(route(("a", 99), ("b", 1)), sticky_key="s", asked=frozenset(), backends=fleet)
    assert ([backend.name for backend in ranked.candidates], ranked.drawn) == (["b", "a"], "a")


def test_a_pinned_backend_is_the_only_candidate() -> None:
    ranked = rank(
        route(("a", 100)), sticky_key="s", asked=frozenset(), backends=backends(a=READY, b=READY), pinned="b"
    )
    assert [backend.name for backend in ranked.candidates] == ["b"]


@given(
    st.lists(st.floats(1, 100), min_size=2, max_size=5),
    st.floats(0.1, 100),
    st.lists(st.text(), min_size=1, max_size=20),
)
def test_a_session_on_a_backend_whose_share_grows_stays_on_it(
    shares: list[float], more: float, sessions: list[str]
) -> None:
    before = [(f"b{i}", share) for i, share in enumerate(shares)]
    after = [("b0", shares[0] + more), *before[1:]]
    scaled = [(name, weight / 7) for name, weight in after]
    for session in sessions:
        first, then = draw("r", session, before), draw("r", session, after)
        assert then in (first, "b0"), "nobody moves but to what grows"
        assert then == draw("r", session, scaled), "only the ratio counts"
        assert then == draw("r", session, list(reversed(after))), "the order in the file does not count"


def test_a_canarys_sessions_stay_on_it_step_by_step_and_each_step_has_its_share() -> None:
    n, on = 10_000, set[str]()
    for percent in (5, 25, 50):
        split = [("a", (100 - percent) * 0.7), ("canary", percent), ("b", (100 - percent) * 0.3)]
        now = {f"s{i}" for i in range(n) if draw("r", f"s{i}", split) == "canary"}
        assert on <= now
        assert abs(len(now) - n * percent / 100) < 4 * math.sqrt(n * percent / 100 * (1 - percent / 100))
        on = now
