"""The serving layer: the request journey, health, and the drain."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import psutil

from accounting.stored_responses import ResponseStore
from budgeting.learned_counter import LearnedCounter
from gateway.backends.workers.inspection import Inspection, WorkerInspections
from gateway.backends.workers.tokenizer_check import TOKENIZED
from gateway.contracts.answer import Answer
from gateway.embedding.journey import MAX_WAIT_S, EmbeddingJourney
from gateway.embedding.questions import QuestionEmbedder
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job
from gateway.health.first_ready import FirstReady
from gateway.health.probe import HealthProbe
from gateway.http.respond import log_defect
from gateway.journey import Journey
from gateway.prompts.prefixes import PrefixWatch
from gateway.requests.background import BackgroundResponses
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.request_record import Reporter
from gateway.requests.stored_responses import StoredResponses
from gateway.routing.revision import answering
from gateway.shadow.guardrail import CanaryGuardrail
from gateway.shadow.mirror import Shadow
from gateway.wiring.batches import BatchParts, make_batches
from gateway.wiring.core import Core
from gateway.wiring.shadow import make_shadow
from observability.events import RequestRecord
from resilience.time_limits import TimeLimit, TimeLimits


@dataclass(frozen=True, slots=True)
class ServingParts:
    """The parts that serve requests."""

    in_flight: InFlightRequests
    shadow: Shadow
    guardrail: CanaryGuardrail
    journey: Journey
    health: HealthProbe
    inspections: WorkerInspections
    first_ready: FirstReady
    embeddings: EmbeddingJourney
    responses: StoredResponses
    background: BackgroundResponses
    batches: BatchParts


def make_serving(core: Core, observe: Callable[[RequestRecord], None] | None) -> ServingParts:
    """Build the layer. Rolling statistics, canary and ``observe`` take the record of each finished request.

    Raises ConfigError.
    """
    base, model, control = core.base, core.model, core.control
    for listener in (base.rolling_stats.observe, control.tally.observe, observe):
        if listener is not None:
            base.events.attach(listener, RequestRecord)
    shadow = make_shadow(core)
    in_flight = InFlightRequests(lame_duck_s=base.settings.server.lame_duck_seconds)
    inspections = make_inspections(core)
    health = make_health(core, in_flight, inspections)
    guardrail = CanaryGuardrail(shadow.comparer.checks, control.tally)
    section, ledger = base.settings.responses, base.settings.ledger
    reporter = Reporter(base.tracing, base.events.emit, log_defect, base.clock)
    embeddings = make_embeddings(core, in_flight, reporter)
    if core.generation.answers.cache is not None:
        core.generation.answers.cache.embedder = QuestionEmbedder(embeddings, base.clock, base.new_id)
    store = None
    if section.store and not ledger.in_memory:
        store = ResponseStore(ledger.url, tenant_bytes=section.max_tenant_bytes, unix_time=base.unix_time)
    responses = StoredResponses(store, section, base.unix_time)

    def answered(job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        guardrail.offer(job, outcome, answer)
        shadow.mirror(job, outcome, answer)

    journey = Journey(
        in_flight=in_flight,
        revision=control.revision,
        versions=model.versions,
        canonicalizer=model.canonicalizer,
        models=model.models,
        offload=model.threads.of,
        adapters=core.adapters.registry,
        fleet=core.backends.fleet,
        images=base.images,
        prefixes=PrefixWatch(
            block_size=lambda name: model.models.of(name).block_size,
            shared=base.settings.engine.share_prefix_across_tenants,
        ),
        admission=core.backends.admission,
        dispatcher=core.generation.dispatcher,
        fallback=core.generation.fallback,
        accounts=core.accounts.accounts,
        mirror=answered,
        limiter=core.access.limiter,
        turns=base.turns,
        reporter=reporter,
        clock=base.clock,
        unix_time=base.unix_time,
        check_shape=model.grammars.checked,
        time_limit=partial(TimeLimit, TimeLimits(), base.settings.server.request_timeout_seconds),
    )
    return ServingParts(
        in_flight=in_flight,
        shadow=shadow,
        guardrail=guardrail,
        journey=journey,
        health=health,
        inspections=inspections,
        first_ready=first_ready(health, clock=base.clock, unix_time=base.unix_time),
        embeddings=embeddings,
        responses=responses,
        background=BackgroundResponses(
            responses, base.clock, counted=in_flight.counted, reporting=in_flight.reporting
        ),
        batches=make_batches(core),
    )


def make_embeddings(core: Core, in_flight: InFlightRequests, reporter: Reporter) -> EmbeddingJourney:
    base, control = core.base, core.control
    return EmbeddingJourney(
        in_flight=in_flight,
        revision=control.revision,
        fleet=core.backends.fleet,
        admission=core.backends.admission,
        limits=replace(control.limits, max_wait_s=MAX_WAIT_S),
        accounts=core.accounts.accounts,
        limiter=core.access.limiter,
        reporter=reporter,
        clock=base.clock,
        unix_time=base.unix_time,
        turns=base.turns,
    )


def make_inspections(core: Core) -> WorkerInspections:
    pools, models = core.backends.engines.pools, core.model.models

    async def ask(generate: bool) -> dict[str, list[Inspection]]:
        found = {}
        for pool in pools.values():
            await pool.follow()
            for one in pool.serving:
                text = models.of(one.model)
                counter = text.tokenizer
                ids = None
                if not isinstance(counter, LearnedCounter):
                    ids = counter.encode(TOKENIZED, add_special_tokens=False)
                found[one.name] = await one.inspect(ids, text.max_model_len, generate=generate)
        return found

    return WorkerInspections(ask)


def make_health(core: Core, in_flight: InFlightRequests, inspections: WorkerInspections) -> HealthProbe:
    base, engines, adapters = core.base, core.backends.engines, core.adapters
    models = core.model.models
    routing = core.control.routing
    return HealthProbe(
        fleet=core.backends.fleet,
        requests=in_flight,
        rolling_stats=base.rolling_stats,
        text=models.of,
        model_loaded=lambda: engines.loaded and adapters.loader.warm,
        engines={one.gate: one.host.status for one in engines.in_process},
        engine_figures=engines.figures,
        state_store_ok=lambda: base.state.ready,
        inspections=inspections,
        routes=lambda: answering(core.control.revision()) if routing.in_force is not None else {},
        clock=base.clock,
        started_at=base.clock(),
    )


def first_ready(
    health: HealthProbe, *, clock: Callable[[], float], unix_time: Callable[[], float]
) -> FirstReady:
    """Build the time to the first ready state, counted from the process start that the kernel reports."""
    age_s, started_at = max(0.0, unix_time() - psutil.Process().create_time()), clock()
    return FirstReady(lambda: all(health.checks().values()), lambda: age_s + clock() - started_at)
