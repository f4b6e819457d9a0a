"""Compares a new key with the routes, adapters and models that exist now."""

from collections.abc import Collection
from typing import Final

from accounting.keys import KeyRecord
from gateway.backends.port import Fleet
from gateway.routing.revision import Revision

MAX_SHOWN: Final = 20
"""The most names that a warning lists."""


def unknown_names(key: KeyRecord, revision: Revision, fleet: Fleet, adapters: Collection[str]) -> list[str]:
    """Return a warning for each name of the key that does not exist now; it may be added later."""
    models = fleet.base_models
    named = {*models, *fleet.aliases, *fleet.backends, *revision.route_of, *adapters}
    given: dict[str, tuple[Collection[str], Collection[str]]] = {
        "routes": (key.routes or (), revision.routes),
        "adapters": (key.adapters or (), adapters),
        "models": (key.models or (), models),
        "aliases": ([model for _, model in key.aliases], named),
        "model_limits": ([one.model for one in key.model_limits], models),
    }
    return [
        f"{field}: there is no {name!r} now; known: {_listed(known)}"
        for field, (names, known) in given.items()
        for name in names
        if name not in known
    ]


def _listed(names: Collection[str]) -> str:
    # The model of a pool is empty until one of its workers is reached.
    shown = sorted(filter(None, names))
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return (", ".join(shown[:MAX_SHOWN]) or "none") + more
