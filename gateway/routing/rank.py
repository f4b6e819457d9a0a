"""Ranks the backends for a request: a pure function of the route, the request and the backends' features."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from adapters.selection import stable_fraction
from adapters.values import Adapter
from gateway.backends.port import READY, Backend, generates, pauses
from gateway.contracts.features import Feature
from gateway.contracts.openai_fields import PASSABLE
from gateway.errors import Forbidden, InvalidRequest
from gateway.routing.revision import Route


class Ranking(Struct, frozen=True):
    """Candidates for a request, best first.

    ``candidates`` support the request's features, ready or not; ``unable`` maps the names of skipped backends
    to the features they lack. ``drawn`` is the backend drawn by weight, ready or not; ``None`` if it lacks a
    feature, or the caller named a backend or a model that not all backends and pools of the route serve.
    """

    candidates: tuple[Backend, ...]
    unable: Mapping[str, frozenset[Feature]]
    drawn: str | None = None

    def first(self, extra: Collection[str] = ()) -> Backend:
        """Return the backend to try first; ``extra`` are request fields that Sluice does not know.

        Raises InvalidRequest with the field that no backend of the route supports.
        """
        if self.candidates:
            return self.candidates[0]
        lack = frozenset().union(*self.unable.values())
        if known := [name for name in extra if name in PASSABLE and Feature.FIELDS_PASSED in lack]:
            are, them = ("is a field", "it") if len(known) == 1 else ("are fields", "them")
            raise InvalidRequest(
                f"{', '.join(known)} {are} of vLLM workers with unknown_fields: pass; this route has "
                f"none; leave {them} out, or choose another route",
                param=known[0],
            )
        if extra and lack & {Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED}:
            are, them = (
                ("is not a known field", "it") if len(extra) == 1 else ("are not known fields", "them")
            )
            raise InvalidRequest(
                f"{', '.join(extra)} {are}; leave {them} out, or set unknown_fields of a backend",
                param=next(iter(extra)),
            )
        lacking = sorted(feature.value for feature in lack)
        raise InvalidRequest(
            f"no backend of this route supports {', '.join(lacking)}; leave it out or choose another route",
            param=Feature(lacking[0]).field if lacking else None,
        )


def rank(
    route: Route,
    *,
    sticky_key: str,
    asked: frozenset[Feature],
    backends: Mapping[str, Backend],
    pinned: str | None = None,
    model: str | None = None,
    models: Collection[str] | None = None,
    serving: Sequence[tuple[str, float]] = (),
    adapter: Adapter | None = None,
) -> Ranking:
    """Order the route's backends for one request.

    The first backend is drawn by weight, sticky by ``sticky_key`` (the session, else the request id); a key
    keeps its backend unless the weight of another one rises. The others follow by weight. Backends that lack
    a requested feature are skipped; ready ones come before others and those that asked for a pause.

    Args:
        pinned: the backend that the request names as ``model``; it is then the only candidate.
        model: the base model that must answer; ignored if no backend of the route serves it.
        models: the models that may answer; ``None``: all.
        serving: the result of :func:`weights_serving` for ``model``, if already computed.
        adapter: a backend whose workers do not have it lacks ``Feature.LORA``.

    Raises Forbidden if no backend that could answer serves one of ``models``.
    """
    weighed = list(serving)
    if pinned is not None:
        weighed = [(pinned, 100.0)]
    elif not weighed:
        weighed = weights_serving(route, model, backends)
    if not weighed:
        weighed = weights_serving(route, None, backends)
    if models is not None:
        weighed = [entry for entry in weighed if backends[entry[0]].model in models]
        if not weighed and pinned is None and model is None:
            weighed = [(name, 1.0) for name in route.backends if backends[name].model in models]
        if not weighed:
            raise Forbidden(
                f"the key may not use the model of this request; allowed: {', '.join(models)}", param="model"
            )
    if len(weighed) > 1:
        drawn = draw(route.name, sticky_key, _shared(weighed, route.pools) if route.pools else weighed)
        order = sorted(weighed, key=lambda entry: (entry[0] != drawn, -entry[1]))
    else:
        drawn, order = weighed[0][0], weighed
    unable: dict[str, frozenset[Feature]] = {}
    able: list[Backend] = []
    for name, _ in order:
        if lack := lacking(asked, adapter, backends[name]):
            unable[name] = lack
        else:
            able.append(backends[name])
    if len(able) > 1:
        able.sort(key=lambda backend: backend.state is not READY or pauses(backend))
    # Only a draw among all backends and pools of the route is a fair comparison of them.
    if drawn in unable:
        fair = False
    elif len(route.weights) == 1:
        fair = drawn == route.weights[0][0]
    else:
        every = weights_serving(route, None, backends)
        fair = weighed == every or (
            pinned is None and bool(route.pools) and _sources(weighed, route) == _sources(every, route)
        )
    return Ranking(tuple(able), unable, drawn if fair else None)


def lacking(asked: frozenset[Feature], adapter: Adapter | None, backend: Backend) -> frozenset[Feature]:
    """What a backend lacks of what is asked; of an adapter at other backends alone ``Feature.LORA``."""
    lack = asked - backend.features
    return lack if adapter is None or adapter.usable_at(backend.name) else lack | {Feature.LORA}


def weights_serving(
    route: Route, model: str | None, backends: Mapping[str, Backend]
) -> list[tuple[str, float]]:
    """Return the route's backends that serve a base model, with weights; ``None``: any that generates text.

    If no backend with a weight serves the model, the route's other backends that do share the requests
    evenly; if none with a weight generates text, the first other one that does gets all requests.
    """
    if model is None:
        weighed = [entry for entry in route.weights if entry[1] > 0]
        able = [entry for entry in weighed if generates(backends[entry[0]])]
        return able or [(name, 100.0) for name in route.backends if generates(backends[name])][:1] or weighed
    serving = [entry for entry in route.weights if entry[1] > 0 and backends[entry[0]].model == model]
    return serving or [(name, 1.0) for name in route.backends if backends[name].model == model]


def _shared(weighed: Sequence[tuple[str, float]], pools: Mapping[str, str]) -> Sequence[tuple[str, float]]:
    """Divide the weight of each pool evenly among those of its backends that are in ``weighed``."""
    sizes = Counter(pools.get(name, name) for name, _ in weighed)
    return [(name, weight / sizes[pools.get(name, name)]) for name, weight in weighed]


def _sources(weighed: Iterable[tuple[str, float]], route: Route) -> set[str]:
    """Return the names that the configuration has for backends: of a model of a pool, that of the pool."""
    return {route.pools.get(name, name) for name, _ in weighed}


def draw(route: str, sticky_key: str, weights: Sequence[tuple[str, float]]) -> str:
    """Return the name for a key by weighted rendezvous hashing; all ``weights`` must be above 0.

    Each name gets a number from the exponential distribution whose rate is its weight, and the least number
    wins, so each name wins in proportion to its weight (Thaler and Ravishankar 1998; the logarithm as in
    Efraimidis and Spirakis 2006). A number depends only on its own name and weight. So a key changes its name
    only if another name's weight rises: a session on a canary at 5 % stays on it at 25 %.
    """
    return min(
        weights, key=lambda entry: -math.log1p(-stable_fraction(route, sticky_key, entry[0])) / entry[1]
    )[0]
