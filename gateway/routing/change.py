"""Pure functions that change the weights of a routing configuration, and that compare two configurations."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.errors import InvalidRequest, UnknownRoute
from gateway.routing.file import RoutingConfig

WHOLE = 100.0
# Decimal digits of a weight: hides floating-point noise, far below the tolerance of the weights' sum.
DIGITS = 10
SAME = 1e-6  # weights that differ by less than this are equal


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One difference between two configurations; a missing value is ``None``.

    ``path`` is dotted and names a route's backends, as in ``routes.chat.backends[local].weight``.
    """

    path: str
    before: Any
    after: Any


def with_weight(config: Mapping[str, Any], route: str, backend: str, percent: float) -> dict[str, Any]:
    """Return the configuration with ``percent`` of a route's weight on ``backend``.

    A backend that the route does not have is added; a backend with weight 0 stays in the route.

    Raises UnknownRoute, InvalidRequest: see :func:`shifted`.
    """
    return with_weights(config, route, shifted(route, weights_of(config, route), backend, percent))


def shifted(route: str, weights: Mapping[str, float], backend: str, percent: float) -> dict[str, float]:
    """Return a route's ``weights`` with ``percent`` on ``backend``.

    The other backends share the rest in proportion to their weights, or equally if all of them are 0. Raises
    InvalidRequest: ``percent`` is below 100 and there is no other backend.
    """
    others, rest = {name: weight for name, weight in weights.items() if name != backend}, WHOLE - percent
    if rest and not others:
        raise InvalidRequest(
            f"percent: {backend!r} is the only backend of {route!r}; none would get the other {rest:g} %",
            param="percent",
        )
    if not sum(others.values()):
        others = dict.fromkeys(others, 1.0)
    total = sum(others.values())
    return {
        **{name: round(rest * weight / total, DIGITS) for name, weight in others.items()},
        backend: percent,
    }


def with_weights(config: Mapping[str, Any], route: str, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the configuration with these weights on a route; others get 0. Raises UnknownRoute."""
    weights_of(config, route)
    changed = config["routes"][route]
    entries = [{**entry, "weight": weights.get(entry["name"], 0.0)} for entry in changed["backends"]]
    have = {entry["name"] for entry in entries}
    entries += [{"name": name, "weight": weight} for name, weight in weights.items() if name not in have]
    return {**config, "routes": {**config["routes"], route: {**changed, "backends": entries}}}


def require_route(route: str, routes: Collection[str]) -> None:
    """Raises UnknownRoute."""
    if route not in routes:
        known = ", ".join(sorted(routes))
        raise UnknownRoute(f"route {route!r} is not configured; known: {known}", param="route")


def weights_of(config: Mapping[str, Any], route: str) -> dict[str, float]:
    """Return a route's weights by backend. Raises UnknownRoute."""
    routes = config["routes"]
    require_route(route, routes)
    return {entry["name"]: float(entry.get("weight", WHOLE)) for entry in routes[route]["backends"]}


def same_weights(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether two routes' weights are equal; a missing backend has weight 0."""
    return all(abs(one.get(name, 0.0) - other.get(name, 0.0)) < SAME for name in {*one, *other})


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with all defaults filled in; unchanged if this version cannot validate it."""
    try:
        return RoutingConfig.model_validate(config).model_dump(mode="json")
    except ValidationError:
        return dict(config)


def typed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is written in the configuration, with numbers and switches for their texts.

    So readers of a revision need not convert ``"90"`` or ``"no"``, which are valid in a routing file. A
    configuration that this version cannot validate is unchanged.
    """
    try:
        return RoutingConfig.model_validate(config).model_dump(mode="json", exclude_unset=True)
    except ValidationError:
        return config


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations are equal once defaults are filled in."""
    first, second = map(whole, _without_equal_routes(one, other))
    return first == second


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the differences, in the file's order; an explicit default equals a missing key."""
    return list(_differences("", *map(whole, _without_equal_routes(before, after))))


def _without_equal_routes(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Leave out the routes that are written alike, but one: a configuration without routes is not valid."""
    routes, others = one.get("routes"), other.get("routes")
    if not isinstance(routes, dict) or not isinstance(others, dict):
        return one, other
    equal = {name for name, route in routes.items() if name in others and others[name] == route}
    equal -= {*list(equal)[:1]}

    def rest(of: Mapping[str, Any]) -> dict[str, Any]:
        return {**of, "routes": {name: route for name, route in of["routes"].items() if name not in equal}}

    return rest(one), rest(other)


def _differences(path: str, before: Any, after: Any) -> Iterator[ConfigChange]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            yield from _differences(f"{path}.{name}" if path else name, before.get(name), after.get(name))
        return
    named_before, named_after = _by_name(before), _by_name(after)
    if named_before is None or named_after is None:
        yield ConfigChange(path, before, after)
        return
    for name in dict.fromkeys((*named_before, *named_after)):
        yield from _differences(f"{path}[{name}]", named_before.get(name), named_after.get(name))
    if list(named_before) != list(named_after) and named_before.keys() == named_after.keys():
        yield ConfigChange(path, list(named_before), list(named_after))


def _by_name(items: Any) -> dict[str, Any] | None:
    """Return a list of named objects as a mapping by name; ``None`` for anything else."""
    if not isinstance(items, list) or not items:
        return None
    if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in items):
        return None
    return {item["name"]: item for item in items}
