"""Checks that the names in a routing configuration exist, and that its fallback chains are useful."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from admission.values import AdmissionLimits
from gateway.routing.file import RouteConfig, RoutingConfig
from resilience.fallback_policy import DEGRADED, RESPONSE_CACHE

RULE_FIELDS = frozenset({"locale", "intent", "tenant"})


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The names that a routing configuration may use, and the admission limits that its routes override.

    ``adapters`` are names and aliases; ``None`` disables the check. The registry is a separate stream, so a
    valid revision may arrive before its adapters.
    """

    backends: Collection[str]
    prompt_versions: Collection[str]
    adapters: Collection[str] | None
    limits: AdmissionLimits | None = None


def adapters_named(config: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(
        str(rule["adapter"])
        for route in config["routes"].values()
        for rule in route.get("adapter_rules") or ()
        if rule.get("adapter") is not None
    )


def check_names(config: RoutingConfig, known: KnownNames) -> list[str]:
    """Return a message for each fault, with its path in the file."""
    faults: list[str] = []
    for name, route in config.routes.items():
        faults += (f"routes.{name}.{fault}" for fault in _route(route, known))
    if config.openai_route is not None and config.openai_route not in config.routes:
        faults.append(
            f"openai_route: unknown route {config.openai_route!r}; allowed: {_listed(config.routes)}"
        )
    return faults


def _route(route: RouteConfig, known: KnownNames) -> list[str]:
    faults: list[str] = []

    def check(path: str, name: str | None, allowed: Collection[str] | None) -> None:
        if name is not None and allowed is not None and name not in allowed:
            faults.append(f"{path}: unknown {name!r}; allowed: {_listed(allowed)}")

    for i, backend in enumerate(route.backends):
        check(f"backends[{i}].name", backend.name, known.backends)
    for i, leg in enumerate(route.fallback):
        check(f"fallback[{i}]", leg, {*known.backends, RESPONSE_CACHE, DEGRADED})
        if [leg] == [backend.name for backend in route.backends]:
            faults.append(
                f"fallback[{i}]: {leg!r} is the route's only backend, so the chain leads back to what "
                "failed; allowed: another backend"
            )
    if route.response_cache.similar is not None and RESPONSE_CACHE not in route.fallback:
        faults.append(
            f"response_cache.similar: the fallback chain has no {RESPONSE_CACHE}; allowed: with it alone"
        )
    if route.shadow is not None:
        check("shadow.backend", route.shadow.backend, known.backends)
        if [route.shadow.backend] == [backend.name for backend in route.backends]:
            faults.append(
                f"shadow.backend: {route.shadow.backend!r} is the route's only backend; allowed: another one"
            )
    check("prompt_version", route.prompt_version, known.prompt_versions)
    check("openai_prompt_version", route.openai_prompt_version, known.prompt_versions)
    for i, rule in enumerate(route.adapter_rules):
        check(f"adapter_rules[{i}].adapter", rule.adapter, known.adapters)
        for field in sorted(rule.when):
            check(f"adapter_rules[{i}].when", field, RULE_FIELDS)
    return faults


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
