"""A whole journey of production stages around a scripted backend, a recording sink and a list as ledger."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from accounting.account import Accounts
from accounting.quotas import Quotas
from accounting.values import UsageRow
from adapters.registry import AdapterRegistry
from adapters.values import Adapter
from admission.controller import AdmissionController
from admission.events import AdmissionEvent
from admission.values import AdmissionLimits
from budgeting.counting import ChatTokenizer
from budgeting.values import Plan
from gateway.backends.port import Absence, Backend, BackendState, Completion, DeltaSink, Fleet, Work
from gateway.config.images import ImagesSection
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.values import Caller, CallerRole, GenerateRequest
from gateway.errors import PublicError
from gateway.generation.answer_cache import AnswerCache
from gateway.generation.dispatcher import Dispatcher
from gateway.generation.fallback import FallbackChain
from gateway.generation.grammars import CheckShape
from gateway.generation.output_guard import OutputGuard
from gateway.generation.retry_loop import RetryLoop
from gateway.images.reading import ImageReader
from gateway.journey import Journey
from gateway.keys.rate_limits import KeyLimiter
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.prefixes import PrefixWatch
from gateway.prompts.text import Models, ModelText
from gateway.prompts.text_threads import TextThreads
from gateway.prompts.versions import PromptVersions
from gateway.requests.body_memory import BodyMemory
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.request_record import Reporter
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from observability.events import RequestRecord
from observability.tracing import Tracing
from resilience.blame import Blame
from resilience.degenerate import Action, DegenerateLimits
from resilience.events import ResilienceEvent
from resilience.failures import BackendFailure, FailureKind
from resilience.leg_limits import LegLimit, LegLimits, LegSkipped
from resilience.response_cache import ResponseCache
from resilience.response_cache_memory import MemoryStore
from resilience.resume import Spelling
from resilience.retry import RetryPolicy
from resilience.retry_budget import RetryBudget
from resilience.time_limits import TimeLimit, TimeLimits
from resilience.turns import Turns
from tests.adapters.crafted import registry_of
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import loop_time

ROOT = Path(__file__).parents[2]
# No model in these tests is longer than this.
LIMITS = AdmissionLimits(max_input_tokens=4096)
CALLER = Caller("acme", CallerRole.CALLER, "key_1")


@dataclass
class RecordingSink:
    """Records what is sent to it; each send yields to the event loop, so that a test can cancel it there."""

    deltas: list[Delta] = field(default_factory=list)
    answer: Answer | None = None
    error: PublicError | None = None
    first_delta: asyncio.Event = field(default_factory=asyncio.Event)
    plans: list[Plan] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    discarded: bool = False

    def planned(self, plan: Plan, model: str) -> None:
        self.plans.append(plan)
        self.models.append(model)

    async def delta(self, delta: Delta) -> None:
        await asyncio.sleep(0)
        if delta != Delta("", 0):
            self.deltas.append(delta)
            self.first_delta.set()

    async def finish(self, answer: Answer) -> None:
        await asyncio.sleep(0)
        assert self.answer is None and self.error is None
        self.answer = answer

    async def fail(self, error: PublicError) -> None:
        await asyncio.sleep(0)
        assert self.answer is None and self.error is None
        self.error = error

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@dataclass
class Outbox:
    """A ledger that stores its rows in a list."""

    rows: list[UsageRow] = field(default_factory=list)

    accepts = True

    def append(self, row: UsageRow) -> bool:
        self.rows.append(row)
        return True

    async def durable(self) -> bool:
        return True


@dataclass
class JourneyRig:
    """A journey and everything that a request might leave in use after its end."""

    journey: Journey
    backends: Mapping[str, Backend]
    admission: AdmissionController
    adapters: AdapterRegistry
    in_flight: InFlightRequests
    outbox: Outbox
    records: list[RequestRecord]
    events: list[ResilienceEvent]
    cache: ResponseCache
    limits: LegLimits
    skipped: list[LegSkipped]
    admissions: list[AdmissionEvent]

    async def run(self, request: GenerateRequest) -> RecordingSink:
        sink = RecordingSink()
        await self.journey.run(request, sink)
        await self.cache.flush()
        return sink

    def in_use(self) -> list[str]:
        """Lists what is still in use; after the end of a request it must be empty."""
        left = []
        if self.in_flight.in_flight:
            left.append("a request in flight")
        for name, backend in self.backends.items():
            if self.admission.gate(name).in_flight:
                left.append(f"a slot of {name}")
            if isinstance(backend, ScriptedBackend) and backend.active:
                left.append(f"a generation on {name}")
        if any(leg.in_use or leg.reserved_nanousd for leg in self.limits.figures().values()):
            left.append("a place in a leg")
        if self.adapters.leased():
            left.append("an adapter lease")
        if self.journey.turns.urgent_count:
            left.append("urgent work")
        others = asyncio.all_tasks() - {asyncio.current_task()}
        left.extend(f"task {task.get_name()}" for task in others)
        return left


class PieceTokenizer:
    """A tokenizer for scripted pieces: an id for each piece, then one for each byte."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = [piece.encode() for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < len(self._pieces):
            return self._pieces[token_id]
        return bytes([token_id - len(self._pieces)])

    text_bytes = token_bytes

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        data, ids = text.encode(), list[int]()
        while data:
            fits = [i for i, piece in enumerate(self._pieces) if piece and data.startswith(piece)]
            ids.append(fits[0] if fits else len(self._pieces) + data[0])
            data = data[len(self.token_bytes(ids[-1])) :]
        return tuple(ids)


class RestartingBackend(ScriptedBackend):
    """A backend whose engine dies with the failure ``engine_dead`` and is ready again after ``restart_s``.

    With ``restart_s`` None it never comes back. A call of a dead engine that fails later does not kill
    the next engine. With ``start_barrier`` the first calls begin only when the barrier has all its parties.
    """

    restart_s: float | None = 0.01
    ready_in_s: float | None = None
    waited_for: asyncio.Event
    start_barrier: asyncio.Barrier | None = None
    deaths = 0

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        before = self.deaths
        if self.start_barrier is not None and not self.calls:
            await self.start_barrier.wait()
        try:
            return await super().generate(work, out)
        except BackendFailure as failure:
            if failure.kind is FailureKind.ENGINE_DEAD and before == self.deaths:
                self.deaths += 1
                self.state = BackendState.DEAD if self.restart_s is None else BackendState.STARTING
                self.ready_in_s = self.restart_s
            raise

    loading = False

    @property
    def absence(self) -> Absence:
        return Absence(f"the engine of {self.name} is away", self.loading)

    async def wait_ready(self, timeout_s: float) -> bool:
        self.waited_for.set()
        if self.state is BackendState.STARTING and self.restart_s is not None:
            await asyncio.sleep(min(self.restart_s, timeout_s))
            if self.restart_s <= timeout_s:
                self.state, self.ready_in_s = BackendState.READY, None
        return self.state is BackendState.READY


async def unchecked(request: GenerateRequest) -> GenerateRequest:
    """No engine compiles the shape."""
    return request


def build_rig(
    tokenizer: ChatTokenizer,
    *scripts: Script,
    backends: Sequence[Backend] | None = None,
    route: Mapping[str, object] | None = None,
    limits: AdmissionLimits = LIMITS,
    clock: Callable[[], float] = loop_time,
    adapters: Sequence[Adapter] = (),
    max_model_len: int = 4096,
    models: Models | None = None,
    spelling: Spelling | None = None,
    on_engine: Collection[str] = (),
    nonsense: Action = Action.OFF,
    legs: Mapping[str, LegLimit] | None = None,
    check_shape: CheckShape = unchecked,
) -> JourneyRig:
    """Builds a JourneyRig around the backends, by default around one that plays the scripts."""
    made: Mapping[str, Backend] = {
        b.name: b for b in backends or [ScriptedBackend(scripts=scripts or (Script(),))]
    }
    first = next(iter(made))
    config = {
        "backends": [{"name": first, "weight": 100}],
        "fallback": ["degraded"],
        "fallback_text_in": ["native", "openai"],
        **(route or {}),
    }
    fleet = Fleet(made)
    registry = registry_of(adapters)
    versions = PromptVersions.from_folder(ROOT / "prompts")
    revision = make_revision(
        1,
        {"routes": {"self_hosted_generation": config}},
        KnownNames(made, versions.ids, registry.ids),
    )
    in_flight, outbox, records = InFlightRequests(), Outbox(), list[RequestRecord]()
    admissions: list[AdmissionEvent] = []
    admission = AdmissionController(
        limits, load=fleet.load, clock=clock, emit=admissions.append, random=random.Random(2)
    )
    served = models or Models(ModelText(tokenizer, max_model_len, Canonicalizer()))
    events: list[ResilienceEvent] = []
    dispatcher = Dispatcher(
        RetryLoop(
            RetryPolicy(RetryBudget(), random.Random(1), events.append),
            clock=clock,
            sleep=asyncio.sleep,
            emit=events.append,
        ),
        OutputGuard(nonsense, DegenerateLimits(), events.append, Blame(clock)),
        lambda model: spelling or served.of(model).tokenizer,
        events.append,
    )
    defects: list[BaseException] = []
    skipped: list[LegSkipped] = []
    limits_of_legs = LegLimits(legs or {}, clock=clock, emit=skipped.append)
    cache = ResponseCache(
        MemoryStore(capacity=100, max_bytes=1 << 20, ttl_s=60.0, clock=clock),
        timeout_s=30.0,
        clock=clock,
        emit=lambda event: None,
    )
    journey = Journey(
        images=ImageReader(ImagesSection(), BodyMemory(1 << 20).holding),
        in_flight=in_flight,
        revision=lambda: revision,
        versions=versions,
        canonicalizer=Canonicalizer(),
        offload=TextThreads().of,
        models=served,
        adapters=registry,
        fleet=fleet,
        prefixes=PrefixWatch(block_size=lambda model: 16),
        admission=admission,
        dispatcher=dispatcher,
        fallback=FallbackChain(
            answers=AnswerCache(cache, "test"),
            limits=limits_of_legs,
            admission=admission,
            dispatcher=dispatcher,
            backends=made,
            clock=clock,
            on_engine=on_engine,
        ),
        accounts=Accounts(outbox),
        limiter=KeyLimiter(Quotas(clock=clock)),
        turns=Turns(),
        reporter=Reporter(
            tracing=Tracing(),
            emit=records.append,
            log_defect=lambda error, _id: defects.append(error),
            clock=clock,
        ),
        clock=clock,
        time_limit=partial(TimeLimit, TimeLimits(), 300.0),
        unix_time=lambda: 1_700_000_000.0,
        check_shape=check_shape,
    )
    return JourneyRig(
        journey,
        made,
        admission,
        registry,
        in_flight,
        outbox,
        records,
        events,
        cache,
        limits_of_legs,
        skipped,
        admissions,
    )
