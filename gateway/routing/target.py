"""Resolves the route of a request, and the backend, adapter or base model that its ``model`` names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from msgspec import Struct

from adapters.errors import AdapterError
from adapters.registry import AdapterRegistry
from adapters.values import Selection
from gateway.backends.port import Backend, Fleet, generates, knows_model
from gateway.contracts.features import Feature
from gateway.contracts.native import DEFAULT_ROUTE
from gateway.contracts.values import CALLER, NATIVE, Caller, GenerateRequest
from gateway.errors import (
    BackendUnavailable,
    Forbidden,
    GatewayError,
    InvalidRequest,
    UnknownModel,
    UnknownRoute,
)
from gateway.routing.rank import weights_serving
from gateway.routing.revision import Revision, Route

NEAREST: Final = 3  # the most names that are suggested for an unknown one

MAX_SHOWN: Final = 20  # the most names that a message lists

RETRY_MS: Final = 1_000
"""Milliseconds until callers should try again while models are not known; workers list them within some."""

MAX_NAME_CHARS: Final = 256
"""Longest unknown name that is compared with the known ones; no model's name is longer."""
MAX_COMPARED: Final = 500
"""Most known names with which it is compared; 11,000 would hold the event loop for half a second."""


class Target(Struct, frozen=True):
    """The route of a request, and the backend, adapter or base model if the caller named one.

    ``serving`` are the backends that serve ``model``, with their weights.
    """

    route: Route
    prompt_version: str | None
    backend: str | None = None
    adapter_id: str | None = None
    model: str | None = None
    serving: Sequence[tuple[str, float]] = ()

    def selection(self, request: GenerateRequest) -> Selection:
        return Selection(
            self.adapter_id,
            self.route.adapter_rules,
            {"tenant": request.caller.tenant, "locale": request.locale, "intent": request.intent},
            sticky_key=request.sticky_key,
            allowed=request.caller.adapters,
            models=request.caller.models,
            operator=request.caller.role is not CALLER,
            or_base=self.route.config.adapter_fallback == "base" and request.allow_fallback,
            named_by="model" if self.adapter_id != request.adapter_id else "adapter_id",
        )


def resolve(request: GenerateRequest, revision: Revision, fleet: Fleet, adapters: AdapterRegistry) -> Target:
    """Resolve the names in a request.

    Raises:
        Forbidden: the key is limited to other routes; the message does not reveal whether the route exists.
        InvalidRequest: ``model`` and ``adapter_id`` name two adapters.
        UnknownRoute: no such route in this revision.
        UnknownModel: ``model`` is neither a backend, nor an adapter, nor a base model that a backend of the
            route serves, nor a model name of a route.
        BackendUnavailable: the same, but not all models of the route are known yet.
    """
    native = request.contract is NATIVE
    caller = request.caller
    model = request.model
    if model is not None and caller.aliases:
        model = dict(caller.aliases).get(model, model)
    selected = None if model is None else revision.route_of.get(model)
    if model is not None and selected is None:
        model = fleet.aliases.get(model, model)
        selected = revision.route_of.get(model)
    name = request.route or selected or (DEFAULT_ROUTE if native else revision.openai_route)
    if not request.caller.tools and Feature.TOOLS in request.needs:
        raise Forbidden("the key may not use tools; allowed: requests without", param="tools")
    allowed = request.caller.routes
    if allowed is not None and name not in allowed:
        raise Forbidden(f"the key may not use route {name!r}; allowed: {', '.join(allowed)}", param="route")
    route = revision.routes.get(name)
    if route is None:
        known = ", ".join(sorted(one for one in revision.routes if allowed is None or one in allowed))
        raise UnknownRoute(f"route {name!r} is not configured; known: {known}", param="route")
    config = route.config
    version = request.prompt_version or (config.prompt_version if native else config.openai_prompt_version)
    usable = caller.models
    if usable is not None and not any(fleet.backends[one].model in usable for one in route.backends):
        require_known([fleet.backends[one] for one in route.backends])
        raise Forbidden(
            f"the key may not use the models of route {name!r}; allowed: {', '.join(usable)}", param="model"
        )
    if model is None or selected == name:
        return Target(route, version, None, request.adapter_id)
    serving = weights_serving(route, model, fleet.backends)
    if serving and caller.may_use(model):
        _require_text(request, fleet.backends[serving[0][0]])
        return Target(route, version, None, request.adapter_id, model, serving)
    if model in adapters.ids:
        if request.adapter_id not in (None, model):
            raise InvalidRequest(
                f"model names the adapter {model!r} and adapter_id another one; allowed: one adapter",
                param="model",
            )
        return Target(route, version, None, model)
    if model in fleet.backends and caller.may_use(fleet.backends[model].model):
        if allowed is not None and model not in route.backends:
            shown = ", ".join(route.backends)
            raise Forbidden(
                f"the key may name only backends of route {name!r} as model; allowed: {shown}", param="model"
            )
        _require_text(request, fleet.backends[model])
        return Target(route, version, model, request.adapter_id)
    require_known([fleet.backends[one] for one in route.backends])
    # The model names of other routes select these only in a request that names no route.
    selectable = {} if request.route else revision.route_of
    known = nearest(request.model or "", _usable_names(caller, route, revision, selectable, fleet, adapters))
    raise UnknownModel(f"model {request.model!r} is not served by route {name!r}; {known}", param="model")


def _require_text(request: GenerateRequest, backend: Backend) -> None:
    if not generates(backend):
        raise UnknownModel(f"model {request.model!r} generates no text", param="model")


def _usable_names(
    caller: Caller,
    route: Route,
    revision: Revision,
    selectable: Mapping[str, str],
    fleet: Fleet,
    adapters: AdapterRegistry,
) -> set[str]:
    """Return the names that the key may use as model on this route; messages show no others.

    ``selectable`` has the route of each model name that selects one.
    """
    allowed = caller.routes
    offered = adapters.offered
    named = {one for one in adapters.servable if offered.usable(one, caller.adapters, caller.models)}
    usable = {name for name, one in fleet.backends.items() if generates(one) and caller.may_use(one.model)}
    backends = usable if allowed is None else usable.intersection(route.backends)
    served = {fleet.backends[name].model for name in usable.intersection(route.backends)}
    aliases = {alias for alias, of in (*fleet.aliases.items(), *caller.aliases) if of in served}
    others = [
        one
        for one, of in selectable.items()
        if (allowed is None or of in allowed)
        and any(caller.may_use(fleet.backends[name].model) for name in revision.routes[of].backends)
    ]
    return {*served, *aliases, *named, *backends, *others}


def require_known(backends: Iterable[Backend]) -> None:
    """Raise BackendUnavailable if the workers of a backend have not listed their models since the start."""
    for one in backends:
        if not knows_model(one):
            raise BackendUnavailable(
                f"the workers of {one.name} have not listed their models yet", retry_after_ms=RETRY_MS
            )


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint for an unknown name: the closest ``known`` names, else a list of them."""
    compared = len(name) <= MAX_NAME_CHARS and len(known) <= MAX_COMPARED
    close = get_close_matches(name, known, n=NEAREST) if compared else []
    if close and len(known) > NEAREST:
        return f"did you mean {' or '.join(close)}? GET /v1/models lists all"
    shown = sorted(known)
    more = "" if len(shown) <= MAX_SHOWN else f" and {len(shown) - MAX_SHOWN} more, in GET /v1/models"
    return f"known: {', '.join(shown[:MAX_SHOWN])}{more}"


def may_use(request: GenerateRequest, revision: Revision, fleet: Fleet, adapters: AdapterRegistry) -> bool:
    """Whether the route, model and adapter of the request exist and the key may use them."""
    try:
        target = resolve(request, revision, fleet, adapters)
        with adapters.lease(target.selection(request)) as lease:
            return lease.adapter is None or request.caller.may_use(lease.adapter.base_model)
    except (GatewayError, AdapterError):
        return False
