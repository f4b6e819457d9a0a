"""A canary whose answers are bad in content is rolled back, by checks that run after the callers have their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.contracts.values import EvidenceChunk, GenerateRequest
from gateway.routing.canary import CanaryPlan, CanaryState, Phase, in_force, judge, start
from gateway.routing.canary_tally import MAX_EXAMINED, CanaryTally
from gateway.shadow.checks import make_checks
from gateway.shadow.guardrail import CanaryGuardrail
from tests.journey.rig import JourneyRig
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

QUESTION = "How long does the delivery of a book take in Germany?"
EVIDENCE = (EvidenceChunk("d1", "faq", "Delivery takes two to three working days within Germany."),)
GOOD = "The delivery takes two to three working days in Germany."
NAMES = ("shape", "language", "grounding", "pii", "no_refusal")
SPLIT = {"backends": [{"name": "old", "weight": 50}, {"name": "new", "weight": 50}]}
PLAN = CanaryPlan(
    "c1", "self_hosted_generation", "new", {"old": 100.0}, "key_1", steps=(50.0, 100.0), guardrails=NAMES
)


class Time:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def judged(
    build_rig: Build, ask: Ask, answer: str, *, requests: int = 80, **changes: object
) -> tuple[CanaryState, CanaryTally]:
    """Returns the canary after one window in which ``new`` gives ``answer`` and ``old`` a good one."""
    backends = [
        ScriptedBackend("old", scripts=(Script((GOOD,)),)),
        ScriptedBackend("new", scripts=(Script((answer,)),)),
    ]
    rig, time = build_rig(backends=backends, route=SPLIT), Time()
    tally = CanaryTally(lambda name: None, time, {})
    tally.watch(PLAN)
    guardrail = CanaryGuardrail(make_checks(NAMES), tally)
    journey = replace(rig.journey, mirror=guardrail.offer)
    rig = replace(rig, journey=journey)
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(guardrail.run())
        for number in range(requests):
            names = {"request_id": f"r{number}", "generation_id": f"g{number}", "session_id": f"s{number}"}
            sink = await rig.run(ask(QUESTION, chunks=EVIDENCE, **names, **changes))
            assert sink.answer is not None
        while guardrail.waiting:  # noqa: ASYNC110 - the guardrail sets no event
            await asyncio.sleep(0.01)
        loop.cancel()
    time.now += PLAN.window_s
    windows = [counts for _, counts in tally.take()]
    return judge(in_force(start(PLAN, read_to=0, now=0.0), 0.0), windows, read_to=1, now=5.0), tally


@pytest.mark.parametrize(
    ("answer", "check"),
    [
        ("Die Lieferung dauert zwei bis drei Tage und ist nicht teuer.", "language"),
        ("Delivery takes 17 days with Hermes from Kathmandu.", "grounding"),
        ("I am sorry, but I cannot help with delivery.", "no_refusal"),
        ("Delivery takes days; write to anna.schmidt@example.com.", "pii"),
        ("   ", "shape"),
    ],
)
async def test_bad_content_rolls_the_canary_back_and_the_reason_names_the_check(
    build_rig: Build, ask: Ask, answer: str, check: str
) -> None:
    state, _ = await judged(build_rig, ask, answer)
    assert state.phase is Phase.ROLLED_BACK
    bad = {name: counts.canary_bad for name, counts in state.counts.items()}
    assert bad[f"guardrail.{check}"] > 0 and state.reason.startswith("guardrail.")


async def test_content_as_good_as_the_baselines_is_no_reason(build_rig: Build, ask: Ask) -> None:
    state, _ = await judged(build_rig, ask, "In Germany the delivery takes two to three working days.")
    assert state.phase is Phase.RUNNING
    assert set(state.counts) >= {"guardrail.language", "guardrail.grounding"}


def test_a_window_examines_a_bounded_sample_of_each_side_and_each_session_once() -> None:
    tally = CanaryTally(lambda name: None, Time(), {})
    assert tally.samples(PLAN.route, "new", None) is None, "no canary is watched"
    tally.watch(PLAN)
    assert tally.samples("other", "new", None) is None
    taken = [
        tally.samples(PLAN.route, side, None) for side in ("new", "old") for _ in range(MAX_EXAMINED + 9)
    ]
    assert taken.count("c1") == 2 * MAX_EXAMINED
    tally = CanaryTally(lambda name: None, Time(), {})
    tally.watch(PLAN)
    assert [tally.samples(PLAN.route, "new", 7) for _ in range(2)] == ["c1", None]


def test_the_content_of_a_pool_of_several_models_counts_for_the_pool() -> None:
    time = Time()
    tally = CanaryTally(lambda name: None, time, {"new": ("new/a", "new/b")})
    tally.watch(PLAN)
    for drawn in ("new/a", "new/b", "old"):
        tally.examined("c1", drawn, {"shape": drawn == "old"})
    time.now += PLAN.window_s
    ((_, counts),) = tally.take()
    shape = counts["guardrail.shape"]
    assert (shape.canary_bad, shape.canary, shape.baseline_bad, shape.baseline) == (2, 2, 0, 1)
