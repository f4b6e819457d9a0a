"""The layer of backends: in-process engines, pools of workers, Bedrock, and injected faults."""

import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
from prometheus_client.registry import Collector

from admission.controller import AdmissionController
from budgeting.counting import ChatTokenizer
from gateway.backends.embedded_vectors import EncodePart
from gateway.backends.faulty import FaultPlan, FaultyBackend
from gateway.backends.host import Resident
from gateway.backends.port import Backend, BackendState, Fleet, configured_name, plain_inputs
from gateway.backends.workers.backend import WorkersBackend
from gateway.backends.workers.loras import WorkerLoras
from gateway.backends.workers.serving_pool import ServingPool
from gateway.config.backends import BedrockSection, EngineBackend, OpenAIBackend
from gateway.config.chaos import ChaosSection
from gateway.config.errors import ConfigError
from gateway.contracts.embeddings import EmbeddingsRequest
from gateway.errors import InvalidRequest
from gateway.prompts.engine_summary import EngineSummarizer
from gateway.prompts.text_threads import TextThreads
from gateway.wiring.adapters import AdapterParts
from gateway.wiring.bedrock import make_bedrock
from gateway.wiring.engine import EngineParts, make_engines
from gateway.wiring.fleet import FleetParts, make_pool
from gateway.wiring.foundation import Foundation
from gateway.wiring.model import ModelParts, make_engine_summarizer
from gateway.wiring.served_models import ServedModels
from gateway.wiring.worker_connections import check_key_variables
from observability.collectors import WorkerStatus, plain, worker_families
from observability.events import EngineFigures
from observability.scrape import ScrapeCollector
from resilience.supervisor import EngineRestarted, SupervisorState


class ResidentBackend(Backend, Resident, Protocol):
    """A backend with background loops."""


# Makes the backend of a name on engines that run elsewhere. The first function counts the requests that wait
# for it here, the second one takes its context length.
MakeEnginePool = Callable[[str, Callable[[], int], Callable[[int], None]], ResidentBackend]


@dataclass(frozen=True, slots=True)
class Engines:
    """The in-process engines, the names of their backends, the pools, and all parts with background loops."""

    in_process: Sequence[EngineParts]
    on_engine: Collection[str]
    pools: Mapping[str, ServingPool]
    residents: Mapping[str, Resident]

    @property
    def loaded(self) -> bool:
        """Whether no in-process engine is still loading, and at least one has loaded, if there are any."""
        hosts = [one.host for one in self.in_process]
        loading = [one for one in hosts if one.facts is None and one.state is BackendState.STARTING]
        return not loading and (not hosts or any(one.facts is not None for one in hosts))

    def restart(self, backend: str, reason: str) -> None:
        for one in self.in_process:
            if backend in one.backends:
                one.host.request_restart(reason)

    def figures(self) -> Mapping[str, EngineFigures | None]:
        return {one.gate: one.host.figures() for one in self.in_process}

    def states(self) -> Mapping[str, SupervisorState]:
        return {one.gate: one.host.status().state for one in self.in_process}

    def on_workers(self) -> Iterator[WorkersBackend]:
        for pool in self.pools.values():
            yield from pool.serving

    def loras(self) -> Sequence[WorkerLoras]:
        """Return the loaded adapters of each worker in service on which this gateway loads adapters."""
        return [loaded for pool in self.pools.values() for loaded in pool.loras()]

    def workers(self) -> Mapping[str, Sequence[WorkerStatus]]:
        return {name: pool.status() for name, pool in self.pools.items()}


@dataclass(frozen=True, slots=True)
class BackendParts:
    """The backends and their admission. ``chaos`` injects faults into those of ``fleet``, not of ``engines``.

    ``models_of`` names the backends of each pool that serves several models.
    """

    engines: Engines
    fleet: Fleet
    models_of: Mapping[str, Sequence[str]]
    chaos: FaultPlan | None
    admission: AdmissionController
    summaries: EngineSummarizer | None

    def collectors(self) -> Iterator[Collector]:
        yield ScrapeCollector(worker_families, self.engines.workers)
        yield plain("sluice_hedged_requests", lambda: hedges(self.engines.on_workers()))
        if (plan := self.chaos) is not None:
            yield plain("sluice_chaos_faults", lambda: plan.injected)


def _is_hosted(sections: Mapping[str, object], backend: str) -> bool:
    """Whether a backend is a service that computes the prompts of all its callers side by side."""
    section = sections.get(configured_name(backend))
    if isinstance(section, OpenAIBackend):
        return section.dialect == "openai"
    return isinstance(section, BedrockSection)


def make_backends(
    base: Foundation, model: ModelParts, adapters: AdapterParts, engine_pool: MakeEnginePool | None
) -> BackendParts:
    """Build the backends; nothing runs yet. Raises ConfigError.

    If the engine runs elsewhere, ``engine_pool`` makes the backends of kind ``engine``.
    """
    check_key_variables(base.settings.backends, os.environ)
    stats, text = base.rolling_stats, model.models.default
    backends: dict[str, Backend] = {}
    gates: dict[str, str] = {}
    whole = Fleet(backends, base.settings.model_aliases)
    admission = AdmissionController(
        base.settings.admission.limits(),
        load=whole.load,
        clock=base.clock,
        emit=base.events.emit,
        random=random.Random(),
        engine_of=gates,
        hosted=partial(_is_hosted, base.settings.backends),
    )
    preempted: dict[str, int] = {}

    def stepped(gate: str, preemptions: int) -> None:
        if preempted.get(gate) != preemptions:
            preempted[gate] = preemptions
            stats.observe_preemptions(sum(preempted.values()))
        if gate:
            admission.wake(gate)

    def limit_context(longest: int) -> None:
        text.limit(min(text.max_model_len, longest))

    base.events.attach(lambda event: stats.engine_restarted(), EngineRestarted)
    engines: Sequence[EngineParts] = ()
    if engine_pool is None:
        engines = make_engines(
            base,
            tokenizer=model.tokenizers.of,
            on_step=stepped,
            make_slots=adapters.loader.make_slots,
            encode=partial(part_encoder, model.threads),
        )
    hosts = {name: one for one in engines for name in one.backends}
    gates |= {name: one.gate for name, one in hosts.items()}

    wrap, chaos = make_chaos(base.settings.chaos, base.settings.backends)
    served = ServedModels(base.settings, model.models, model.tokenizers, model.canonicalizer, base.clock)
    fleet = FleetParts(served, wrap, admission, adapters.registry.list_at_workers, whole.aliases, backends)
    residents: dict[str, Resident] = {}
    on_engine: dict[str, Backend] = {}
    for name, section in base.settings.backends.items():
        match section:
            case EngineBackend() if engine_pool is not None:
                queued = partial(queued_at, admission, name)
                fleet.sources[name] = residents[name] = engine_pool(name, queued, limit_context)
            case EngineBackend() if name in hosts:
                without = base.settings.incapable(hosts[name].section.model_id)
                made = hosts[name].host.backend(name, section.unknown_fields.features, without)
                fleet.sources[name] = on_engine[name] = made
            case OpenAIBackend():
                fleet.sources[name] = residents[name] = make_pool(name, section, base, model, adapters, fleet)
            case BedrockSection():
                without = base.settings.incapable(section.model_id)
                fleet.sources[name] = residents[name] = make_bedrock(
                    name, section, clock=base.clock, without=without
                )
    fleet.refresh()
    parts = Engines(engines, on_engine, fleet.pools, residents)
    adapters.loader.attach_workers(parts.loras)
    summaries = make_engine_summarizer(
        text,
        versions=model.versions,
        backend=next((on_engine[one.gate] for one in engines if one.name is None and one.backends), None),
        new_id=base.new_id,
    )
    return BackendParts(parts, whole, fleet.models_of, chaos, admission, summaries)


def queued_at(admission: AdmissionController, backend: str) -> int:
    return admission.gate(backend).queued


def part_encoder(threads: TextThreads, tokenizer: ChatTokenizer) -> EncodePart:
    """Return a function that tokenizes texts for an engine's model, in threads that all tenants share."""

    async def encode(part: EmbeddingsRequest) -> Sequence[Sequence[int]]:
        inputs = plain_inputs(part)
        texts = sum(len(one) for one in inputs if isinstance(one, str))

        def ids() -> list[Sequence[int]]:
            return [tokenizer.encode(one) if isinstance(one, str) else one for one in inputs]

        return await threads.run(part.caller.tenant, texts, ids) if texts else ids()

    return encode


def make_chaos(
    section: ChaosSection, backends: Collection[str]
) -> tuple[Callable[[Backend], Backend], FaultPlan | None]:
    """Return the wrapper that injects faults, and its control, if enabled. Raises ConfigError for a rule."""
    if not section.enabled:
        return lambda backend: backend, None
    structlog.get_logger("gateway").warning(
        "FAULTS ARE MADE ON PURPOSE: chaos.enabled is true; never serve real callers like this"
    )
    plan = FaultPlan(frozenset(backends), random.Random(section.seed))
    try:
        plan.replace(section.faults)
    except InvalidRequest as error:
        raise ConfigError(f"chaos.{error.param}: {error.message}") from None
    return lambda backend: FaultyBackend(backend, plan), plan


def hedges(backends: Iterable[WorkersBackend]) -> Mapping[tuple[str, str], int]:
    """Return the number of hedges, by backend and result."""
    found = [(one.name, one.hedging) for one in backends if one.hedging is not None]
    return {
        (name, result): count
        for name, one in found
        for result, count in (("won", one.won), ("lost", one.sent - one.won), ("refused", one.refused))
    }
