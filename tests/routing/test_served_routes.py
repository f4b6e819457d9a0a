"""A route that names a pool of several models has a backend for each; the revision itself is not changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.routing.check import KnownNames
from gateway.routing.rank import rank
from gateway.routing.revision import Route, ServedRoutes, make_revision
from tests.scripted import ScriptedBackend

CONFIG = {
    "routes": {
        "chat": {
            "backends": [{"name": "gpus", "weight": 90}, {"name": "local", "weight": 10}],
            "fallback": ["local", "spare", "degraded"],
        }
    }
}
REVISION = make_revision(1, CONFIG, KnownNames(["gpus", "local", "spare"], [], []))


def test_routes_follow_the_models_of_pools() -> None:
    models_of: dict[str, Sequence[str]] = {}
    routes = ServedRoutes(lambda: REVISION, models_of)
    assert routes() is REVISION
    models_of["gpus"] = ("gpus/a", "gpus/b")
    route = routes().routes["chat"]
    assert route.weights == (("gpus/a", 90.0), ("gpus/b", 90.0), ("local", 10.0))
    assert route.fallback == ("local", "spare", "degraded") and routes() is routes()
    models_of["spare"] = ("spare/a", "spare/c")
    assert routes().routes["chat"].fallback == ("local", "spare/a", "spare/c", "degraded")
    assert routes().routes["chat"].backends == ("gpus/a", "gpus/b", "local", "spare/a", "spare/c")
    models_of.clear()
    assert routes() is REVISION


def of_three_models() -> Route:
    """The route, whose pool ``gpus`` has 90 % and three models."""
    return ServedRoutes(lambda: REVISION, {"gpus": ("gpus/a", "gpus/b", "gpus/c")})().routes["chat"]


@pytest.mark.parametrize(
    ("asked", "served_by"),
    [
        ({}, {"gpus/a", "gpus/b", "gpus/c", "local"}),
        ({"models": ("a", "b")}, {"gpus/a", "gpus/b", "local"}),  # the caller's key is limited to these
        ({"model": "a"}, {"gpus/a", "local"}),
    ],
)
def test_the_models_of_a_pool_share_its_weight(asked: Mapping[str, Any], served_by: set[str]) -> None:
    route = of_three_models()
    models = {"gpus/a": "a", "gpus/b": "b", "gpus/c": "c", "local": "a"}
    fleet = {name: ScriptedBackend(name, model=model) for name, model in models.items()}
    n, p = 4_000, 0.1
    first = [
        rank(route, sticky_key=f"s{i}", asked=frozenset(), backends=fleet, **asked).candidates[0].name
        for i in range(n)
    ]
    assert set(first) == served_by
    assert abs(first.count("local") - n * p) < 4 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ({}, True),
        ({"model": "a"}, True),
        ({"models": ("a", "b")}, True),
        ({"model": "b"}, False),  # only the pool has it
        ({"pinned": "gpus/a"}, False),
    ],
)
def test_a_request_counts_for_a_canary_if_all_pools_may_answer_it(
    asked: Mapping[str, Any], counts: bool
) -> None:
    models = {"gpus/a": "a", "gpus/b": "b", "gpus/c": "c", "local": "a"}
    fleet = {name: ScriptedBackend(name, model=model) for name, model in models.items()}
    for session in ("s1", "s2", "s3"):
        ranked = rank(of_three_models(), sticky_key=session, asked=frozenset(), backends=fleet, **asked)
        assert (ranked.drawn == ranked.candidates[0].name) is counts
