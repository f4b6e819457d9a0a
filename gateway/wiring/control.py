"""The layer of control: the routing in force, its canary, and admission."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import ValidationError

from admission.values import AdmissionLimits
from gateway.config.yaml_file import load_yaml
from gateway.contracts.evaluation_report import evaluation_key
from gateway.contracts.native import DEFAULT_ROUTE
from gateway.routing.canary_loop import CanaryDriver
from gateway.routing.canary_records import STREAM as CANARY_STREAM
from gateway.routing.canary_tally import CanaryTally
from gateway.routing.change import typed
from gateway.routing.check import KnownNames
from gateway.routing.evaluations import STREAM as EVALUATIONS_STREAM
from gateway.routing.evaluations import BackendEvaluations, digest_of
from gateway.routing.file import RoutingConfig
from gateway.routing.projection import STREAM, RoutingProjection, Seed
from gateway.routing.revision import (
    RoutingFileError,
    ServedRoutes,
    default_routing,
    make_revision,
)
from gateway.wiring.adapters import AdapterParts
from gateway.wiring.backends import BackendParts
from gateway.wiring.foundation import Foundation
from gateway.wiring.model import ModelParts
from observability.collectors import CanaryFigures

DEFAULT_FILE = "routing.yaml"
# The settings that determine which model answers; an evaluation is valid only for their values.
BACKEND_IDENTITY = {"kind", "base_urls", "model", "model_id", "region", "endpoint_url"}
ENGINE_IDENTITY = {"kind", "model", "tokenizer", "dtype", "quantization", "extra_args"}


@dataclass(frozen=True, slots=True)
class ControlParts:
    """Decides which backend answers a request, and when; ``limits`` apply to routes without their own.

    ``revision`` returns the routing in force.
    """

    routing: RoutingProjection
    revision: ServedRoutes
    canary: CanaryDriver
    tally: CanaryTally
    evaluations: BackendEvaluations
    limits: AdmissionLimits

    def canary_figures(self) -> CanaryFigures | None:
        state = self.canary.state
        if state is None:
            return None
        return CanaryFigures(
            route=state.plan.route,
            backend=state.plan.backend,
            phase=state.phase.value,
            percent=state.wanted.get(state.plan.backend, 0.0),
            requests=state.canary_requests,
            evidence={check: evidence.log_e for check, evidence in state.evidence.items()},
            bound=state.plan.bound,
        )


def make_control(
    base: Foundation, model: ModelParts, adapters: AdapterParts, backends: BackendParts
) -> ControlParts:
    """Build the layer. An invalid routing file is an error only if the state store has no revision."""
    state, limits = base.state, base.settings.admission.limits()
    known = KnownNames(tuple(base.settings.backends), model.versions.ids, adapters.registry.servable, limits)
    seed = read_seed(base.settings.routing.file, known)
    routing = RoutingProjection(state.store, known, seed, base.unix_time)
    routing.follow(state.follow(STREAM, routing.take, prepare=routing.prepare))
    tally = CanaryTally(lambda name: routing.current().routes.get(name), base.unix_time, backends.models_of)
    canary = CanaryDriver(
        state.store, routing, base.audit, tally, me=base.new_id("proc"), unix_time=base.unix_time
    )
    canary.follow(state.follow_latest(CANARY_STREAM, canary.take))
    return ControlParts(
        routing=routing,
        revision=ServedRoutes(routing.current, backends.models_of),
        canary=canary,
        tally=tally,
        evaluations=make_evaluations(base),
        limits=limits,
    )


def make_evaluations(base: Foundation) -> BackendEvaluations:
    settings = base.settings
    engines = settings.engines_of_backends
    digests = {
        name: digest_of(
            section.model_dump(mode="json", include=BACKEND_IDENTITY),
            engines[name].model_dump(mode="json", include=ENGINE_IDENTITY) if name in engines else {},
        )
        for name, section in settings.backends.items()
    }
    evaluations = BackendEvaluations(digests=digests, key=evaluation_key(os.environ))
    evaluations.follow(base.state.follow(EVALUATIONS_STREAM, evaluations.take))
    return evaluations


def has_default_file(backends: Collection[str]) -> bool:
    """Whether the working directory has a routing file for a gateway with these backends.

    A file that names none of them is another gateway's. One with a fault is reported when it is read.
    """
    try:
        config = RoutingConfig.model_validate(load_yaml(path := Path(DEFAULT_FILE), RoutingFileError))
    except (RoutingFileError, ValidationError):
        return path.exists()
    return any(one.name in backends for route in config.routes.values() for one in route.backends)


def read_seed(file: str | None, known: KnownNames) -> Seed:
    """Read and validate the routing file; without a file, return a default route over all backends."""
    path = Path(file or DEFAULT_FILE)
    if file is None and not has_default_file(known.backends):
        structlog.get_logger("routing").info(
            "no routing.file, and no routing.yaml for these backends: one route over all backends",
            route=DEFAULT_ROUTE,
            backends=list(known.backends),
        )
        return Seed("the default route", default_routing(known.backends))
    try:
        config = load_yaml(path, lambda fault: RoutingFileError(f"routing.file: {fault}"))
        make_revision(1, config, known, source=str(path))
    except RoutingFileError as error:
        return Seed(path.name, None, error)
    return Seed(path.name, typed(config), file=str(path))
