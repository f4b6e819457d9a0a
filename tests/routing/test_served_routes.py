"""A route that names a pool of several models has a backend for each; the revision itself is not changed."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.check import KnownNames
from gateway.routing.revision import ServedRoutes, make_revision

CONFIG = {
    "routes": {
        "chat": {
            "backends": [{"name": "gpus", "weight": 90}, {"name": "local", "weight": 10}],
            "fallback": ["local", "spare", "degraded"],
        }
    }
}


def test_routes_follow_the_models_of_pools() -> None:
    revision = make_revision(1, CONFIG, KnownNames(["gpus", "local", "spare"], [], []))
    models_of: dict[str, Sequence[str]] = {}
    routes = ServedRoutes(lambda: revision, models_of)
    assert routes() is revision
    models_of["gpus"] = ("gpus/a", "gpus/b")
    route = routes().routes["chat"]
    assert route.weights == (("gpus/a", 90.0), ("gpus/b", 90.0), ("local", 10.0))
    assert route.fallback == ("local", "spare", "degraded") and routes() is routes()
    models_of["spare"] = ("spare/a", "spare/c")
    assert routes().routes["chat"].fallback == ("local", "spare/a", "spare/c", "degraded")
    assert routes().routes["chat"].backends == ("gpus/a", "gpus/b", "local", "spare/a", "spare/c")
    models_of.clear()
    assert routes() is revision
