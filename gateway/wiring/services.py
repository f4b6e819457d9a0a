"""Builds :class:`gateway.ports.Services`, which the HTTP edge uses: operators' services and all others."""

import os
import socket
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

from admission.events import Admitted, RefusedEvent
from gateway.admin.adapters import AdapterAdmin
from gateway.admin.admission import AdmissionAdmin
from gateway.admin.canary import CanaryAdmin
from gateway.admin.chaos import ChaosAdmin
from gateway.admin.console import ConsoleAdmin
from gateway.admin.drain import DrainAdmin
from gateway.admin.evaluations import EvaluationAdmin
from gateway.admin.keys import KeyAdmin
from gateway.admin.prompts import PromptAdmin
from gateway.admin.routing import RoutingAdmin
from gateway.admin.usage import ShadowAdmin, UsageAdmin
from gateway.contracts.evaluation_report import evaluation_key
from gateway.contracts.openai_answer import REASONING_FIELDS
from gateway.contracts.responses.request import ReasoningSeal
from gateway.keys.failed_logins import FailedLogins
from gateway.keys.new_key import NewKeyChecks
from gateway.keys.usable_models import usable
from gateway.lora.model_cards import model_cards
from gateway.ports import Services
from gateway.requests.body_memory import RECORDINGS, UPLOADS, BodyMemory
from gateway.requests.in_flight import InFlightRequests
from gateway.routing.revision import rules_naming
from gateway.routing.target import may_use
from gateway.wiring.core import Core
from gateway.wiring.foundation import Foundation, make_cipher
from gateway.wiring.serving import ServingParts
from observability.events import RequestRecord
from observability.metrics import Metrics


def make_services(core: Core, serving: ServingParts, admission: AdmissionAdmin, metrics: Metrics) -> Services:
    base, models, control = core.base, core.model.models, core.control
    server, fleet, chaos = base.settings.server, core.backends.fleet, core.backends.chaos
    keys = core.access.keys
    return Services(
        journey=serving.journey,
        embeddings=serving.embeddings,
        may_use=lambda request: may_use(request, control.revision(), fleet, core.adapters.registry),
        keys=keys.authority,
        limiter=core.access.limiter,
        failed_logins=FailedLogins(clock=base.clock, proxies=server.trusted_proxies, emit=base.events.emit),
        health=replace(serving.health, pings=lambda: serving.first_ready.after_s() is not None)
        if server.ping == "once_ready"
        else serving.health,
        idempotency=base.state.idempotency,
        text=models.of,
        text_threads=core.model.threads,
        models=lambda caller: usable(
            model_cards(fleet, core.adapters.registry, lambda name: models.of(name).max_model_len),
            caller,
            control.revision(),
        ),
        metrics=metrics.render,
        limits=server,
        seal=make_seal(base),
        reasoning_fields=REASONING_FIELDS if server.reasoning_field == "both" else (server.reasoning_field,),
        bodies=base.bodies,
        turns=base.turns,
        recordings=BodyMemory(RECORDINGS * server.max_audio_bytes),
        uploads=BodyMemory(UPLOADS * base.settings.batches.max_file_bytes),
        clock=base.clock,
        unix_time=base.unix_time,
        new_id=base.new_id,
        version=base.version,
        emit_edge=serving.journey.reporter.edge,
        open_metrics=not base.settings.auth.metrics,
        admission=admission,
        adapters=make_adapter_admin(core),
        canary=CanaryAdmin(
            control.canary,
            control.routing,
            base.state.store,
            base.audit,
            new_id=lambda: base.new_id("canary"),
            unix_time=base.unix_time,
            evaluation_fault=control.evaluations.fault,
            guardrails=tuple(serving.shadow.comparer.checks.errors),
        ),
        evaluations=EvaluationAdmin(control.evaluations, base.audit),
        chaos=None if chaos is None else ChaosAdmin(chaos, base.audit),
        drain=DrainAdmin(serving.in_flight, base.audit),
        key_admin=KeyAdmin(
            keys.ring,
            keys.projection,
            keys.use,
            core.access.limiter,
            base.audit,
            unix_time=base.unix_time,
            warnings_of=NewKeyChecks(
                control.revision, fleet, core.adapters.registry.ids, core.accounts.is_priced
            ).warnings,
        ),
        console=make_console(core, admission, serving.in_flight),
        sessions=core.access.sessions,
        prompts=make_prompt_admin(core),
        routing=RoutingAdmin(control.routing, base.audit),
        shadow=ShadowAdmin(serving.shadow.pairs, lambda: control.revision().routes),
        usage=UsageAdmin(core.accounts.ledger.select, base.unix_time),
        responses=serving.responses,
        background=serving.background,
        files=serving.batches.files,
        batches=serving.batches.batches,
    )


def make_seal(base: Foundation) -> ReasoningSeal | None:
    """Build the encryption of reasoning; ``None`` without a key. Raises ConfigError: the key, a package."""
    cipher = make_cipher(base.settings, "reasoning")
    if cipher is None:
        return None
    from gateway.keys.sealing import AesReasoningSeal

    return AesReasoningSeal(cipher)


def make_admission_admin(core: Core) -> AdmissionAdmin:
    """Build the operators' view of admission, which receives the last decisions from the event bus."""
    control = core.control
    admin = AdmissionAdmin(
        control.limits,
        core.backends.admission,
        revision=control.revision,
        clock=core.base.clock,
        unix_time=core.base.unix_time,
    )
    core.base.events.attach(admin.observe, Admitted, RefusedEvent)
    return admin


def make_console(core: Core, admission: AdmissionAdmin, in_flight: InFlightRequests) -> ConsoleAdmin:
    """Build the data source of the console, which receives finished requests from the event bus."""
    base, fleet = core.base, core.backends.fleet

    def backends() -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "kind": one.kind,
                "model": one.model,
                "state": one.state.value,
                "load": None if one.load is None else asdict(one.load),
            }
            for name, one in fleet.backends.items()
        ]

    console = ConsoleAdmin(
        admission=admission.show,
        in_flight=lambda: in_flight.in_flight,
        figures=base.rolling_stats.figures,
        backends=backends,
        workers=core.backends.engines.workers,
        targets=lambda: core.control.revision().targets,
        store=base.state.store,
        version=base.version,
        audit=base.audit,
        # The name must differ between processes; port 0 means any free port, so the pid replaces it.
        name=f"{socket.gethostname()}:{base.settings.server.port or f'pid-{os.getpid()}'}",
        clock=base.clock,
        unix_time=base.unix_time,
    )
    base.events.attach(console.observe, RequestRecord)
    return console


def make_adapter_admin(core: Core) -> AdapterAdmin:
    parts, revision = core.adapters, core.control.revision
    return AdapterAdmin(
        projection=parts.projection,
        registry=parts.registry,
        loader=parts.loader,
        orders=parts.orders,
        source=parts.source,
        audit=core.base.audit,
        base_model=core.base.settings.engine.model_id,
        routed=lambda name: rules_naming(revision(), name),
        evaluation_key=evaluation_key(os.environ),
    )


def make_prompt_admin(core: Core) -> PromptAdmin:
    model = core.model
    return PromptAdmin(
        registry=model.versions,
        publishing=model.publishing,
        canonicalizer=model.canonicalizer,
        models=model.models,
        images=core.base.images,
        revision=core.control.revision,
        fleet=core.backends.fleet,
        adapters=core.adapters.registry,
    )
