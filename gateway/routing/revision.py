"""Validates a routing configuration and turns it into a frozen revision."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from adapters.values import SelectionRule
from admission.values import AdmissionLimits
from budgeting.values import PromptSection
from gateway.config.yaml_file import explain
from gateway.routing.check import KnownNames, check_names
from gateway.routing.file import RouteConfig, RouteShadow, RoutingConfig, SimilarQuestions
from gateway.routing.route_limits import RESUME, resume_rules, route_limits
from observability.slo_metrics import SloTargets
from resilience.fallback_policy import DEGRADED, RESPONSE_CACHE
from resilience.resume import ResumeRules


class RoutingFileError(Exception):
    """The routing file cannot be used; the message has one line per fault, with its path in the file."""


@dataclass(frozen=True, slots=True)
class RouteBudgets:
    """A route's token budgets; ``None`` and missing sections take the prompt version's values.

    Args:
        reserve: tokens reserved for the answer.
        spare: sections that may use the unused tokens of other sections, in order.
        max_input_tokens: tokens of the longest prompt; ``None``: as long as the model allows.
        trim_in: the contracts whose prompts may be trimmed.
    """

    sections: Mapping[PromptSection, int] = field(default_factory=dict)
    reserve: int | None = None
    spare: tuple[PromptSection, ...] | None = None
    max_input_tokens: int | None = None
    trim_in: tuple[str, ...] = ("native",)


NO_ROUTE_BUDGETS = RouteBudgets()


@dataclass(frozen=True, slots=True)
class Route:
    """One route as the request journey uses it.

    ``weights`` are percent, in file order; ``limits`` are admission's, ``None``: each backend's own;
    ``adapter_fallback``: the base model answers if the adapter cannot be loaded; ``record_content``: traces
    contain prompts and answers; ``timeout_s``: the total time of a request that sets no deadline;
    ``fallback_text_in``: the contracts (``native``, ``openai``) whose callers may get a cached answer or the
    degraded text; ``models``: names by which callers of OpenAI's API select the route; ``similar``:
    which questions share an answer of the response cache, ``None``: only equal ones.
    """

    name: str
    weights: tuple[tuple[str, float], ...]
    fallback: tuple[str, ...]
    prompt_version: str | None
    openai_prompt_version: str | None
    adapter_rules: tuple[SelectionRule, ...]
    degraded_text: str
    ttft_slo_ms: float
    total_slo_ms: float
    budgets: RouteBudgets = NO_ROUTE_BUDGETS
    limits: AdmissionLimits | None = None
    resume: ResumeRules = RESUME
    timeout_s: float = 60.0
    adapter_fallback: bool = False
    record_content: bool = False
    shadow: RouteShadow | None = None
    fallback_text_in: tuple[str, ...] = ("native",)
    similar: SimilarQuestions | None = None

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
    # For each model that a route names, the route.
    route_of: Mapping[str, str] = field(default_factory=dict)
    # The service levels of each route, as the metrics read them.
    targets: Mapping[str, SloTargets] = field(default_factory=dict)


def answering(revision: Revision) -> Mapping[str, Collection[str]]:
    """Return the names of the backends and fallback targets that may answer, by route."""
    return {
        name: [*(backend for backend, weight in route.weights if weight), *route.fallback]
        for name, route in revision.routes.items()
    }


def rules_naming(revision: Revision, adapter_id: str) -> list[str]:
    """Return the paths of the rules that name an adapter."""
    return [
        f"routes.{route.name}.adapter_rules[{index}]"
        for route in revision.routes.values()
        for index, rule in enumerate(route.adapter_rules)
        if rule.adapter_id == adapter_id
    ]


DEFAULT_ROUTE = "self_hosted_generation"


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
        raise RoutingFileError(explain(error, RoutingConfig, lambda loc: source)) from None
    faults = check_names(config, known)
    openai_route = config.openai_route or (
        DEFAULT_ROUTE if DEFAULT_ROUTE in config.routes else next(iter(config.routes))
    )
    if faults:
        raise RoutingFileError("\n".join(f"{source}: {fault}" for fault in faults))
    routes = {name: _freeze(name, route, known.limits) for name, route in config.routes.items()}
    route_of = {model: name for name, route in config.routes.items() for model in route.models}
    targets = {name: SloTargets(route.ttft_slo_ms, route.total_slo_ms) for name, route in routes.items()}
    return Revision(
        number,
        MappingProxyType(routes),
        openai_route,
        MappingProxyType(route_of),
        MappingProxyType(targets),
    )


def _freeze(name: str, route: RouteConfig, base: AdmissionLimits | None) -> Route:
    limits = route_limits(base, route.admission, ttft_slo_ms=route.slo.ttft_ms, tpot_slo_ms=route.slo.tpot_ms)
    return Route(
        name=name,
        weights=tuple((backend.name, backend.weight) for backend in route.backends),
        fallback=tuple(route.fallback),
        fallback_text_in=route.fallback_text_in,
        prompt_version=route.prompt_version,
        openai_prompt_version=route.openai_prompt_version,
        adapter_rules=tuple(
            SelectionRule(MappingProxyType(dict(r.when)), r.adapter, MappingProxyType(dict(r.labels)))
            for r in route.adapter_rules
        ),
        adapter_fallback=route.adapter_fallback == "base",
        degraded_text=route.degraded_text,
        ttft_slo_ms=route.slo.ttft_ms,
        total_slo_ms=route.slo.total_ms,
        budgets=RouteBudgets(
            sections=MappingProxyType(
                {PromptSection(name): tokens for name, tokens in route.budgets if tokens is not None}
            ),
            reserve=route.reserve,
            spare=None if route.spare is None else tuple(map(PromptSection, route.spare)),
            max_input_tokens=None if limits is None else limits.max_input_tokens,
            trim_in=route.trim_in,
        ),
        limits=limits,
        resume=resume_rules(route.resume),
        timeout_s=route.timeout_ms / 1000,
        record_content=route.record_content,
        shadow=route.shadow,
        similar=route.response_cache.similar,
    )


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
