"""Fixtures: a builder of houses and a maker of requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from accounting.account import Accounts
from accounting.quotas import Quotas
from adapters.registry import AdapterRegistry
from adapters.values import Adapter
from admission.controller import AdmissionController
from admission.values import AdmissionLimits
from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from gateway.backends.port import Backend, Fleet
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.config.images import ImagesSection
from gateway.contracts.values import Contract, GenerateRequest
from gateway.generation.answer_cache import AnswerCache
from gateway.generation.dispatcher import Dispatcher
from gateway.generation.fallback import FallbackChain
from gateway.generation.output_guard import OutputGuard
from gateway.generation.retry_loop import RetryLoop
from gateway.images.reading import ImageReader
from gateway.journey import Journey
from gateway.keys.rate_limits import KeyLimiter
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.models import Models
from gateway.prompts.prefixes import PrefixWatch
from gateway.prompts.text import ModelText
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
from resilience.leg_limits import LegLimit, LegLimits, LegSkipped
from resilience.response_cache import ResponseCache
from resilience.response_cache_memory import MemoryStore
from resilience.resume import Spelling
from resilience.retry import RetryPolicy
from resilience.retry_budget import RetryBudget
from resilience.time_limits import TimeLimit, TimeLimits
from tests.journey.house import CALLER, House, Outbox

ROOT = Path(__file__).parents[2]
# Every model is at most this long here.
LIMITS = AdmissionLimits(max_input_tokens=4096)


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_folder(ROOT / "models" / "demo")


@pytest.fixture
def build_house(tokenizer: ChatTokenizer) -> Callable[..., House]:
    def build(
        *scripts: Script,
        backends: Sequence[ScriptedBackend] | None = None,
        route: Mapping[str, object] | None = None,
        limits: AdmissionLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        adapters: Sequence[Adapter] = (),
        max_model_len: int = 4096,
        models: Models | None = None,
        spelling: Spelling | None = None,
        on_engine: Collection[str] = (),
        nonsense: Action = Action.OFF,
        legs: Mapping[str, LegLimit] | None = None,
    ) -> House:
        made = {b.name: b for b in backends or [ScriptedBackend(scripts=scripts or (Script(),))]}
        first = next(iter(made))
        config = {
            "backends": [{"name": first, "weight": 100}],
            "fallback": ["degraded"],
            "fallback_text_in": ["native", "openai"],
            **(route or {}),
        }
        fleet_backends: Mapping[str, Backend] = made
        fleet = Fleet(fleet_backends)
        registry = AdapterRegistry(adapters)
        versions = PromptVersions.from_folder(ROOT / "prompts")
        revision = make_revision(
            1,
            {"routes": {"self_hosted_generation": config}},
            KnownNames(made, versions.ids, registry.ids),
        )
        in_flight, outbox, records = InFlightRequests(), Outbox(), list[RequestRecord]()
        admission = AdmissionController(
            limits, load=fleet.load, clock=clock, emit=lambda event: None, random=random.Random(2)
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
            lambda model: spelling or served.tokenizer(model),
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
                backends=fleet_backends,
                clock=clock,
                on_engine=on_engine,
            ),
            accounts=Accounts(outbox),
            limiter=KeyLimiter(Quotas(clock=clock)),
            reporter=Reporter(
                tracing=Tracing(),
                emit=records.append,
                log_defect=lambda _id, error: defects.append(error),
                clock=clock,
            ),
            clock=clock,
            time_limit=partial(TimeLimit, TimeLimits(), 300.0),
            unix_time=lambda: 1_700_000_000.0,
        )
        return House(
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
        )

    return build


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    def make(text: str = "Recommend something like Vinland Saga", **changes: object) -> GenerateRequest:
        request = GenerateRequest(
            request_id="req_1",
            generation_id="gen_1",
            contract=Contract.NATIVE,
            caller=CALLER,
            arrived_at=time.monotonic(),
            created=1_700_000_000,
            messages=(Message(Role.USER, text),),
        )
        return replace(request, **changes)  # type: ignore[arg-type]

    return make
