"""The routing in force, in which a pool of several models is one backend for each of its models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gateway.routing.revision import Revision, Route


class ServedRoutes:
    """Returns the revision in force, in which routes name the backends of a pool instead of the pool.

    Args:
        current: returns the revision in force.
        models_of: the backends of each pool of several models, each with the pool's weight; may change.
    """

    def __init__(self, current: Callable[[], Revision], models_of: Mapping[str, Sequence[str]]) -> None:
        self._current = current
        self._models_of = models_of
        self._made: tuple[Revision, Mapping[str, Sequence[str]], Revision] | None = None

    def __call__(self) -> Revision:
        """Return the current revision; computed again only after a change."""
        revision = self._current()
        if not self._models_of:
            return revision
        if self._made is None or self._made[0] is not revision or self._made[1] != self._models_of:
            routes = {name: self._with_models(route) for name, route in revision.routes.items()}
            made = replace(revision, routes=MappingProxyType(routes))
            self._made = (revision, dict(self._models_of), made)
        return self._made[2]

    def _with_models(self, route: Route) -> Route:
        def of(name: str) -> Sequence[str]:
            return self._models_of.get(name, (name,))

        return replace(
            route,
            weights=tuple((one, weight) for name, weight in route.weights for one in of(name)),
            fallback=tuple(one for name in route.fallback for one in of(name)),
        )
