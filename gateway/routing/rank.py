"""Ranking of backends: a pure function of the revision, the request and what the fleet can do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.backends.port import Backend, BackendState, Feature
from gateway.routing.revision import Route


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates for a request, best first.

    ``candidates`` can honour the request and may be alive or not; ``unable`` maps the names of backends
    that were passed over to the features they lack.
    """

    candidates: tuple[Backend, ...]
    unable: Mapping[str, frozenset[Feature]]


def stable_fraction(*parts: str) -> float:
    """A number in [0, 1) that depends on the parts alone: the same on every process and machine."""
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def rank(
    route: Route,
    *,
    sticky_key: str,
    asked: frozenset[Feature],
    backends: Mapping[str, Backend],
    pinned: str | None = None,
) -> Ranking:
    """Order the route's backends for one request.

    The first is drawn by weight, sticky by ``sticky_key`` (the session, else the request id); the others
    follow by weight. Backends that lack an asked feature are passed over; ready ones go before others.

    Args:
        pinned: a backend that the caller named as ``model``; it is the only candidate then.
    """
    weights = ((pinned, 100.0),) if pinned is not None else route.weights
    # Nothing is drawn from one.
    drawn = _draw(weights, stable_fraction(route.name, sticky_key)) if len(weights) > 1 else weights[0][0]
    order = sorted(
        (entry for entry in weights if entry[1] > 0), key=lambda entry: (entry[0] != drawn, -entry[1])
    )
    unable = {name: lack for name, _ in order if (lack := asked - backends[name].features)}
    able = [backends[name] for name, _ in order if name not in unable]
    able.sort(key=lambda backend: backend.state is not BackendState.READY)
    return Ranking(tuple(able), unable)


def _draw(weights: tuple[tuple[str, float], ...], fraction: float) -> str:
    point = fraction * sum(weight for _, weight in weights)
    for name, weight in weights:
        point -= weight
        if point < 0:
            return name
    return weights[-1][0]
