"""Validates a routing configuration and turns it into a frozen revision."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from adapters.values import SelectionRule
from admission.values import AdmissionLimits
from budgeting.values import SPARE_ORDER, PromptSection
from gateway.config.yaml_file import explain
from gateway.contracts.native import DEFAULT_ROUTE
from gateway.routing.check import KnownNames, check_names
from gateway.routing.file import RouteConfig, RoutingConfig
from gateway.routing.route_limits import RESUME, resume_rules, route_limits
from observability.slo_metrics import SloTargets
from resilience.fallback_policy import DEGRADED, RESPONSE_CACHE
from resilience.resume import ResumeRules


class RoutingFileError(Exception):
    """The routing file cannot be used; the message has one line per fault, with its path in the file."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route as the request journey uses it: ``config``, and what is computed from it.

    Args:
        weights: percent, in file order; each backend of a pool of several models has the pool's weight.
        pools: the pool of each such backend.
        limits: those of admission; ``None``: each backend's own.
        budgets: tokens per prompt section; a missing one has the prompt version's.
        spare: sections that may use the unused tokens of others, in order.
    """

    name: str
    config: RouteConfig
    weights: tuple[tuple[str, float], ...]
    pools: Mapping[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()
    adapter_rules: tuple[SelectionRule, ...] = ()
    limits: AdmissionLimits | None = None
    resume: ResumeRules = RESUME
    budgets: Mapping[str, int] = field(default_factory=dict)
    spare: tuple[PromptSection, ...] = SPARE_ORDER

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of the route: those of ``weights``, then those of the fallback chain."""
        named = [name for name, _ in self.weights]
        named += [name for name in self.fallback if name not in (RESPONSE_CACHE, DEGRADED)]
        return tuple(dict.fromkeys(named))


@dataclass(frozen=True, slots=True)
class Revision:
    """An immutable routing configuration; a request uses one revision from start to end."""

    number: int
    routes: Mapping[str, Route]
    openai_route: str
    route_of: Mapping[str, str] = field(default_factory=dict)  # for each model that a route names, the route
    # The service levels of each route, as the metrics read them.
    targets: Mapping[str, SloTargets] = field(default_factory=dict)


def answering(revision: Revision) -> Mapping[str, Collection[str]]:
    """Return the names of the backends and fallback targets that may answer, by route."""
    return {
        name: [*(backend for backend, weight in route.weights if weight), *route.fallback]
        for name, route in revision.routes.items()
    }


def rules_naming(revision: Revision, adapter_id: str) -> list[str]:
    return [
        f"routes.{route.name}.adapter_rules[{index}]"
        for route in revision.routes.values()
        for index, rule in enumerate(route.adapter_rules)
        if rule.adapter_id == adapter_id
    ]


def default_routing(backends: Collection[str]) -> dict[str, Any]:
    """Return a routing of one route: the first backend answers, the others are its fallback in order."""
    first, *others = backends
    route = {"backends": [{"name": first, "weight": 100}], "fallback": others}
    return {"routes": {DEFAULT_ROUTE: route}}


def make_revision(number: int, data: Any, known: KnownNames, *, source: str = "routing") -> Revision:
    """Validate a routing configuration and freeze it.

    Raises RoutingFileError with all faults and their paths.
    """
    try:
        config = RoutingConfig.model_validate(data)
    except ValidationError as error:
        found = explain(error, RoutingConfig, lambda loc: source).split("\n")
        if (rest := _without_unknown_keys(data, error)) is not None:
            try:
                make_revision(number, rest, known, source=source)
            except RoutingFileError as further:
                found += str(further).split("\n")
        raise RoutingFileError("\n".join(dict.fromkeys(found))) from None
    faults = check_names(config, known)
    openai_route = config.openai_route or (
        DEFAULT_ROUTE if DEFAULT_ROUTE in config.routes else next(iter(config.routes))
    )
    if faults:
        raise RoutingFileError("\n".join(f"{source}: {fault}" for fault in faults))
    routes = {name: _freeze(name, route, known.limits) for name, route in config.routes.items()}
    route_of = {model: name for name, route in config.routes.items() for model in route.models}
    targets = {
        name: SloTargets(route.slo.ttft_ms, route.slo.total_ms) for name, route in config.routes.items()
    }
    return Revision(
        number,
        MappingProxyType(routes),
        openai_route,
        MappingProxyType(route_of),
        MappingProxyType(targets),
    )


def _without_unknown_keys(data: Any, error: ValidationError) -> Any:
    """A copy of ``data``, whose other faults are found only without them; ``None`` if there are none."""
    unknown = [fault["loc"] for fault in error.errors() if fault["type"] == "extra_forbidden"]
    if not unknown:
        return None
    rest = deepcopy(data)
    for *path, key in unknown:
        at = rest
        for part in path:
            at = at[part]
        at.pop(key, None)  # a YAML alias is the same mapping at another path
    return rest


def _freeze(name: str, route: RouteConfig, base: AdmissionLimits | None) -> Route:
    limits = route_limits(base, route.admission, ttft_slo_ms=route.slo.ttft_ms, tpot_slo_ms=route.slo.tpot_ms)
    return Route(
        name,
        route,
        weights=tuple((backend.name, backend.weight) for backend in route.backends),
        fallback=tuple(route.fallback),
        adapter_rules=tuple(
            SelectionRule(MappingProxyType(dict(r.when)), r.adapter, MappingProxyType(dict(r.labels)))
            for r in route.adapter_rules
        ),
        limits=limits,
        resume=resume_rules(route.resume),
        budgets=MappingProxyType(route.budgets.model_dump(exclude_none=True)),
        spare=SPARE_ORDER if route.spare is None else tuple(map(PromptSection, route.spare)),
    )


class ServedRoutes:
    """Returns the revision in force, in which routes name the backends of a pool instead of the pool.

    Args:
        current: returns the revision in force.
        models_of: the backends of each pool of several models, which share the pool's weight; may change.
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
            pools={one: name for name, _ in route.weights for one in self._models_of.get(name, ())},
            fallback=tuple(one for name in route.fallback for one in of(name)),
        )
