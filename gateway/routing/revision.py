"""Routing configuration: what an operator writes, validated whole, and the frozen revision made of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from adapters.values import SelectionRule
from admission.values import Limits
from budgeting.values import Section
from gateway.prompts.budgets import NO_ROUTE_BUDGETS, RouteBudgets
from gateway.routing.route_limits import RouteAdmission, route_limits

# Legs of a fallback chain that are not backends.
RESPONSE_CACHE = "response_cache"
DEGRADED = "degraded"
RULE_FIELDS = frozenset({"locale", "intent", "tenant"})


class RoutingFileError(Exception):
    """The routing file cannot be used; the message has one line per fault, with its path in the file."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Tokens = Annotated[int, Field(ge=0, le=10_000_000)]


class WeightedBackend(_Part):
    """A backend's share of a route's sessions, in percent."""

    name: str
    weight: Annotated[float, Field(ge=0, le=100)] = 100.0


class AdapterRule(_Part):
    """Selects an adapter when every named field of the request has the given value."""

    when: dict[str, str]
    adapter: str


class Slo(_Part):
    """Targets that reports and guards measure against (seed 000 §1: 200 ms TTFT, 1,400 ms total)."""

    ttft_ms: Annotated[float, Field(gt=0)] = 200.0
    total_ms: Annotated[float, Field(gt=0)] = 1400.0
    tpot_ms: Annotated[float, Field(gt=0)] | None = None


class BudgetsConfig(_Part):
    """Tokens per section; what is missing here is as in the prompt version."""

    system: _Tokens | None = None
    retrieval: _Tokens | None = None
    recent_turns: _Tokens | None = None
    older_summary: _Tokens | None = None


class RouteConfig(_Part):
    """One route."""

    backends: Annotated[list[WeightedBackend], Field(min_length=1)]
    fallback: list[str] = Field(default_factory=lambda: [DEGRADED])
    slo: Slo = Slo()
    prompt_version: str | None = None
    openai_prompt_version: str | None = None
    adapter_rules: list[AdapterRule] = Field(default_factory=list)
    budgets: BudgetsConfig = BudgetsConfig()
    reserve: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    spare: list[Literal["retrieval", "recent_turns"]] | None = None
    admission: RouteAdmission = RouteAdmission()
    degraded_text: Annotated[str, Field(min_length=1)] = (
        "I'm handling a lot of questions right now. Please try again in a moment."
    )

    @model_validator(mode="after")
    def _weights_add_up(self) -> RouteConfig:
        total = sum(backend.weight for backend in self.backends)
        if abs(total - 100.0) > 1e-6:
            raise ValueError(f"backends: weights add up to {total:g}; allowed: 100")
        names = [backend.name for backend in self.backends]
        if len(set(names)) != len(names):
            raise ValueError("backends: a backend is named twice")
        if len(set(self.fallback)) != len(self.fallback):
            raise ValueError("fallback: a leg is named twice")
        return self


class RoutingConfig(_Part):
    """The whole routing configuration."""

    routes: Annotated[dict[str, RouteConfig], Field(min_length=1)]
    openai_route: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One route as the journey uses it.

    ``weights`` are percent, in file order; ``limits`` are admission's, ``None``: each backend's own.
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
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Revision:
    """An immutable routing configuration; a request sees one revision from start to end."""

    number: int
    routes: Mapping[str, Route]
    openai_route: str
    author: str = "file"
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """Names that a routing configuration may refer to, and the admission limits that its routes vary."""

    backends: Collection[str]
    prompt_versions: Collection[str]
    adapters: Collection[str]
    limits: Limits | None = None


DEFAULT_ROUTE = "self_hosted_generation"


def load_routing(path: Path, known: Known) -> Revision:
    """Read a routing file as revision 1.

    Raises:
        RoutingFileError: it cannot be read, or is wrong; every fault with its path in the file.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RoutingFileError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise RoutingFileError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return make_revision(1, data, known, source=str(path), comment=f"seeded from {path.name}")


def make_revision(
    number: int, data: Any, known: Known, *, source: str = "routing", author: str = "file", comment: str = ""
) -> Revision:
    """Validate a routing configuration whole and freeze it.

    Raises:
        RoutingFileError: names every fault and where it stands.
    """
    try:
        config = RoutingConfig.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{source}: {'.'.join(str(p) for p in fault['loc']) or 'file'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ]
        raise RoutingFileError("\n".join(lines)) from None
    faults = list(_unknown_names(config, known))
    openai_route = config.openai_route or (
        DEFAULT_ROUTE if DEFAULT_ROUTE in config.routes else next(iter(config.routes))
    )
    if openai_route not in config.routes:
        faults.append(f"openai_route: unknown route {openai_route!r}; allowed: {_listed(config.routes)}")
    if faults:
        raise RoutingFileError("\n".join(f"{source}: {fault}" for fault in faults))
    routes = {name: _freeze(name, route, known.limits) for name, route in config.routes.items()}
    return Revision(number, MappingProxyType(routes), openai_route, author, comment)


def _unknown_names(config: RoutingConfig, known: Known) -> list[str]:
    legs = {*known.backends, RESPONSE_CACHE, DEGRADED}
    faults: list[str] = []

    def check(path: str, name: str | None, allowed: Collection[str]) -> None:
        if name is not None and name not in allowed:
            faults.append(f"routes.{path}: unknown {name!r}; allowed: {_listed(allowed)}")

    for name, route in config.routes.items():
        for i, backend in enumerate(route.backends):
            check(f"{name}.backends[{i}].name", backend.name, known.backends)
        for i, leg in enumerate(route.fallback):
            check(f"{name}.fallback[{i}]", leg, legs)
        check(f"{name}.prompt_version", route.prompt_version, known.prompt_versions)
        check(f"{name}.openai_prompt_version", route.openai_prompt_version, known.prompt_versions)
        for i, rule in enumerate(route.adapter_rules):
            check(f"{name}.adapter_rules[{i}].adapter", rule.adapter, known.adapters)
            for field in sorted(rule.when):
                check(f"{name}.adapter_rules[{i}].when", field, RULE_FIELDS)
    return faults


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _freeze(name: str, route: RouteConfig, base: Limits | None) -> Route:
    limits = route_limits(base, route.admission, ttft_slo_ms=route.slo.ttft_ms, tpot_slo_ms=route.slo.tpot_ms)
    return Route(
        name=name,
        weights=tuple((backend.name, backend.weight) for backend in route.backends),
        fallback=tuple(route.fallback),
        prompt_version=route.prompt_version,
        openai_prompt_version=route.openai_prompt_version,
        adapter_rules=tuple(
            SelectionRule(MappingProxyType(dict(r.when)), r.adapter) for r in route.adapter_rules
        ),
        degraded_text=route.degraded_text,
        ttft_slo_ms=route.slo.ttft_ms,
        total_slo_ms=route.slo.total_ms,
        budgets=RouteBudgets(
            sections=MappingProxyType(
                {Section(name): tokens for name, tokens in route.budgets if tokens is not None}
            ),
            reserve=route.reserve,
            spare=None if route.spare is None else tuple(map(Section, route.spare)),
            max_input_tokens=None if limits is None else limits.max_input_tokens,
        ),
        limits=limits,
    )
