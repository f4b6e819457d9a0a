"""Fixtures: a request journey with a shadow backend."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from accounting.account import Accounts
from accounting.errors import LedgerUnavailable
from accounting.prices import Price
from accounting.shadow_values import ShadowPair
from budgeting.counting import ChatTokenizer
from gateway.contracts.features import Feature
from gateway.contracts.values import GenerateRequest
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import Models, ModelText
from gateway.shadow.asking import Asker
from gateway.shadow.checks import make_checks
from gateway.shadow.comparing import Comparer
from gateway.shadow.judge import Judge
from gateway.shadow.mirror import Shadow
from gateway.shadow.personal import Redactor, redact_personal
from gateway.shadow.sampling import ShadowOutcome, ShadowQueue
from resilience.leg_limits import LegLimit, LegLimits
from tests.journey.conftest import ask, build_rig, tokenizer
from tests.journey.rig import JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend

__all__ = ["ask", "build_rig", "tokenizer"]

OURS, THEIRS = Script(), Script(("Good", " day", "."))
BEDROCK_FEATURES = frozenset({Feature.TEMPERATURE, Feature.TOP_P, Feature.STOP})


@dataclass
class FakePairStore:
    """A fake database: a list that may be unavailable."""

    pairs: list[ShadowPair] = field(default_factory=list)
    unavailable: bool = False

    async def write(self, pairs: Sequence[ShadowPair], *, now: float) -> None:
        if self.unavailable:
            raise LedgerUnavailable("unavailable")
        self.pairs += pairs

    async def close(self) -> None:
        pass  # nothing to close


@dataclass
class ShadowRig:
    """A journey, its shadow, and the stored pairs."""

    base: JourneyRig
    shadow: Shadow
    store: FakePairStore
    limits: LegLimits

    @property
    def other(self) -> ScriptedBackend:
        return self.base.backends["other"]

    async def run(self, request: GenerateRequest) -> RecordingSink:
        sink = RecordingSink()
        await self.base.journey.run(request, sink)
        return sink

    def count(self, outcome: ShadowOutcome) -> int:
        return self.shadow.outcomes[outcome]

    async def until(self, outcome: ShadowOutcome, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while self.count(outcome) < count:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(self.shadow.run(), name="shadow")
            try:
                yield
            finally:
                loop.cancel()


@pytest.fixture
def build(build_rig: Callable[..., JourneyRig], tokenizer: ChatTokenizer) -> Callable[..., ShadowRig]:
    def make(
        *,
        sample: float = 1.0,
        primary: Script = OURS,
        other: Script = THEIRS,
        features: frozenset[Feature] = BEDROCK_FEATURES,
        queue: int = 100,
        queue_bytes: int = 1 << 20,
        concurrency: int = 2,
        deadline_s: float = 10.0,
        spend_nanousd: int | None = None,
        redact: Redactor = redact_personal,
        judge: Script | None = None,
        keep_texts: bool = False,
        **rig_settings: object,
    ) -> ShadowRig:
        backends = [
            ScriptedBackend("local", scripts=(primary,)),
            ScriptedBackend("other", scripts=(other,), features=features, model="haiku"),
            ScriptedBackend("judge", scripts=(judge or Script(("A",)),)),
        ]
        rig = build_rig(
            backends=backends, route={"shadow": {"backend": "other", "sample": sample}}, **rig_settings
        )
        cost = Price(input_nanousd=10**9, output_nanousd=5 * 10**9, cached_nanousd=10**8).cost_nanousd
        limits = LegLimits(
            {"other": LegLimit(None, spend_nanousd, cost)}, clock=time.monotonic, emit=lambda _: None
        )

        ids = iter(range(1_000_000))
        asker = Asker(
            backends=rig.backends,
            admission=rig.admission,
            adapters=rig.adapters,
            limits=limits,
            accounts=Accounts(rig.outbox),
            models=Models(ModelText(tokenizer, 4096, Canonicalizer())),
            redact=redact,
            clock=time.monotonic,
            unix_time=lambda: 1_700_000_000.0,
            new_id=lambda: f"shadow_{next(ids)}",
            timeout_s=deadline_s,
            idle_share=0.5,
        )
        store = FakePairStore()
        shadow = Shadow(
            queue=ShadowQueue(queue, queue_bytes),
            asker=asker,
            comparer=Comparer(
                make_checks(("shape", "language", "grounding", "pii", "no_refusal")),
                redact,
                {"other": cost},
                keep_texts,
                lambda: 1_700_000_000.0,
            ),
            pairs=store,
            judge=None if judge is None else Judge(asker, "judge", 1.0, 8, random.Random(1)),
            concurrency=concurrency,
            deadline_s=deadline_s,
            clock=time.monotonic,
            unix_time=lambda: 1_700_000_000.0,
        )
        rig = replace(rig, journey=replace(rig.journey, mirror=shadow.mirror))
        return ShadowRig(rig, shadow, store, limits)

    return make
