"""The routing in force with the models of pools: a pool of several models is a backend for each of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gateway.routing.revision import Revision, Route


class ServedRoutes:
    """Returns the revision in force; a route that names a pool of several models names their backends.

    Args:
        current: the revision in force.
        models_of: the backends of each such pool, with the weight of the pool each; may change.
    """

    def __init__(self, current: Callable[[], Revision], models_of: Mapping[str, Sequence[str]]) -> None:
        self._current = current
        self._models_of = models_of
        self._made: tuple[Revision, Mapping[str, Sequence[str]], Revision] | None = None

    def __call__(self) -> Revision:
        """The revision as of now."""
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
