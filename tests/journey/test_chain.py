"""The fallback chain by reason: what is tried where, what is changed, and what is never asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.values import EvidenceChunk
from gateway.backends.port import BackendState
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.contracts.values import GenerateRequest, Sampling
from gateway.generation.fallback_policy import (
    MAX_SEAMS,
    FallbackPolicy,
    ServeStored,
    Situation,
    Step,
    TryBackend,
    WaitForRestart,
)
from gateway.routing.revision import DEGRADED, RESPONSE_CACHE
from gateway.routing.route_resume import RESUME, ResumeRules
from resilience.failures import BackendFailure, FailureKind
from tests.journey.house import House

Build = Callable[..., House]
Ask = Callable[..., GenerateRequest]

OOM = Script((), failure=BackendFailure(FailureKind.CUDA_OOM, "no memory"))
NAN = Script((), failure=BackendFailure(FailureKind.NAN_OUTPUT, "not a number"))
DEAD = Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))


async def test_after_out_of_memory_the_prompt_is_shortened_and_the_answer_says_so(
    build_house: Build, ask: Ask
) -> None:
    house = build_house(OOM, Script())
    chunks = tuple(EvidenceChunk(f"m{i}", "catalog", "Vinland Saga has 27 volumes. " * 8) for i in range(12))
    answer = (await house.run(ask(chunks=chunks))).answer
    assert answer is not None and answer.fallback is None
    first, second = house.backends["local"].calls
    assert len(second.token_ids) <= len(first.token_ids) // 2
    [warning] = answer.warnings
    assert str(len(first.token_ids)) in warning and str(len(second.token_ids)) in warning
    counts = answer.budget
    sent = counts.system + counts.retrieval + counts.recent_turns + counts.older_summary
    assert sent == len(second.token_ids) == answer.usage.input_tokens == house.outbox.rows[0].input_tokens
    assert counts.dropped_chunks or counts.cut_chunks


async def test_a_prompt_is_shortened_once_and_what_cannot_be_cut_is_sent_as_it_is(
    build_house: Build, ask: Ask
) -> None:
    house = build_house(OOM, OOM, Script())
    answer = (await house.run(ask())).answer
    assert answer is not None and answer.warnings == ()
    assert len({work.token_ids for work in house.backends["local"].calls}) == 1


async def test_an_answer_to_a_shortened_prompt_is_not_remembered(build_house: Build, ask: Ask) -> None:
    house = build_house(OOM, Script(), DEAD, route={"fallback": ["response_cache", "degraded"]})
    chunks = tuple(EvidenceChunk(f"m{i}", "catalog", "Vinland Saga has 27 volumes. " * 8) for i in range(12))
    await house.run(ask(chunks=chunks))
    answer = (await house.run(ask(chunks=chunks))).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"


@pytest.mark.parametrize("seed", [None, 7])
async def test_after_an_answer_that_is_not_a_number_another_seed_is_tried(
    build_house: Build, ask: Ask, seed: int | None
) -> None:
    house = build_house(NAN, Script())
    answer = (await house.run(ask(sampling=Sampling(seed=seed, temperature=0.7)))).answer
    assert answer is not None and answer.fallback is None
    first, second = house.backends["local"].calls
    assert first.sampling.seed == seed
    assert second.sampling.seed not in (None, seed)


@pytest.mark.parametrize("kind", [FailureKind.CUDA_OOM, FailureKind.ENGINE_DEAD])
async def test_a_leg_on_the_same_engine_is_passed_over(
    build_house: Build, ask: Ask, kind: FailureKind
) -> None:
    failing = Script((), failure=BackendFailure(kind, "it is the device", final=True))
    names = ("local", "twin", "far")
    house = build_house(
        backends=[
            ScriptedBackend(name, scripts=[failing if name == "local" else Script()]) for name in names
        ],
        route={"fallback": ["twin", "far"]},
        on_engine=["local", "twin"],
    )
    answer = (await house.run(ask())).answer
    assert answer is not None and answer.backend_name == "far"
    assert answer.fallback is not None and answer.fallback.reason == kind.value
    assert house.backends["twin"].calls == []


async def test_a_leg_that_is_not_ready_is_passed_over(build_house: Build, ask: Ask) -> None:
    backends = [
        ScriptedBackend("local", scripts=[DEAD]),
        ScriptedBackend("away", state=BackendState.STARTING),
        ScriptedBackend("far"),
    ]
    house = build_house(backends=backends, route={"fallback": ["away", "far"]})
    answer = (await house.run(ask())).answer
    assert answer is not None and answer.backend_name == "far"


async def test_the_degraded_text_comes_last_wherever_it_stands(build_house: Build, ask: Ask) -> None:
    house = build_house(
        backends=[ScriptedBackend("local", scripts=[DEAD]), ScriptedBackend("far")],
        route={"fallback": ["degraded", "far"]},
    )
    answer = (await house.run(ask())).answer
    assert answer is not None and answer.backend_name == "far"


async def test_bad_input_is_never_answered_by_a_fallback(build_house: Build, ask: Ask) -> None:
    bad = Script((), failure=BackendFailure(FailureKind.INVALID_INPUT, "no"))
    house = build_house(
        backends=[ScriptedBackend("local", scripts=[bad]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"]},
    )
    sink = await house.run(ask())
    assert sink.error is not None and house.backends["far"].calls == []


CUT = Script(breaks_after=1, failure=BackendFailure(FailureKind.STREAM_BROKEN, "cut"))
TWO = Sampling(n=2, temperature=1.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "held"])
async def test_what_broke_off_unseen_and_cannot_be_gone_on_with_is_asked_for_once_more(
    build_house: Build, ask: Ask, stream: bool
) -> None:
    house = build_house(
        backends=[ScriptedBackend("local", scripts=[CUT, Script()]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"], "resume": {"commit_chunks": 8, "commit_ms": 1000}},
    )
    answer = (await house.run(ask(sampling=TWO, stream=stream))).answer
    assert answer is not None and answer.backend_name == "local" and answer.fallback is None
    assert answer.output_text == "Hello there."
    assert house.backends["far"].calls == []
    assert [row.output_tokens for row in house.outbox.rows] == [answer.usage.output_tokens]
    assert house.left_behind() == []


async def test_what_breaks_off_unseen_twice_is_left_to_the_next_leg(build_house: Build, ask: Ask) -> None:
    house = build_house(
        backends=[ScriptedBackend("local", scripts=[CUT]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"]},
    )
    answer = (await house.run(ask(sampling=TWO))).answer
    assert answer is not None and answer.backend_name == "far"
    assert len(house.backends["local"].calls) == 2


# The course alone

LEGS = (RESPONSE_CACHE, "twin", "far", DEGRADED)


def view(
    *able: str, back_in_s: float | None = None, restarts: bool = False, committed: bool = False
) -> Situation:
    return Situation(lambda name: name in able, back_in_s, restarts, committed)


def course(
    legs: Sequence[str] = LEGS, *, in_hand: bool = True, rules: ResumeRules = RESUME
) -> FallbackPolicy:
    return FallbackPolicy("gpu", legs, rules, on_engine=("gpu", "twin"), in_hand=in_hand)


def test_memory_pressure_goes_straight_to_the_next_leg_and_never_back_to_the_device() -> None:
    it = course()
    it.refused("gpu", memory=True)
    it.gave_nothing(RESPONSE_CACHE)
    assert it.next(view("gpu", "twin", "far", back_in_s=0.0, restarts=True)) == TryBackend("far")
    it.refused("far", memory=False)
    assert it.next(view("gpu", "twin", "far", back_in_s=0.0, restarts=True)) == ServeStored(DEGRADED)


def test_a_dead_engine_is_waited_for_before_the_degraded_text_but_behind_the_legs() -> None:
    it = course()
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    away = view("far", back_in_s=20.0, restarts=True)
    assert it.next(away) == ServeStored(RESPONSE_CACHE)
    it.gave_nothing(RESPONSE_CACHE)
    assert it.next(away) == TryBackend("far")
    it.failed("far", FailureKind.THROTTLED, moved=False)
    assert it.next(away) == WaitForRestart(RESUME.max_wait_s)
    it.waited(0.0, back=False)
    assert it.next(away) == ServeStored(DEGRADED)


@pytest.mark.parametrize(
    ("kind", "affords", "wanted"),
    [
        (FailureKind.STREAM_BROKEN, True, TryBackend("gpu")),
        (FailureKind.INTERNAL, True, TryBackend("gpu")),
        (FailureKind.STREAM_BROKEN, False, TryBackend("far")),
        (FailureKind.THROTTLED, True, TryBackend("far")),
        (FailureKind.NAN_OUTPUT, True, TryBackend("far")),  # the guard has tried it again
    ],
)
def test_a_whole_answer_is_asked_for_once_more_where_that_is_wise_and_paid_for(
    kind: FailureKind, affords: bool, wanted: Step
) -> None:
    it = course(("far", DEGRADED))
    it.failed("gpu", kind, moved=False, again=lambda: affords)
    there = view("gpu", "far")
    assert it.next(there) == wanted
    it.failed("gpu", kind, moved=False, again=lambda: affords)
    assert it.next(there) == TryBackend("far"), "once"


def test_who_said_how_long_he_can_wait_waits_for_a_restart_before_the_degraded_text() -> None:
    for in_time, wanted in ((True, WaitForRestart(RESUME.max_wait_s)), (False, ServeStored(DEGRADED))):
        it = course((DEGRADED,), in_hand=False)
        it.failed("gpu", FailureKind.BACKEND_UNAVAILABLE, moved=False)
        assert it.next(replace(view(back_in_s=4.0, restarts=True), in_time=in_time)) == wanted


def test_a_pool_whose_last_worker_broke_a_stream_off_is_waited_for_like_an_engine() -> None:
    it = FallbackPolicy("pool", (DEGRADED,), RESUME, in_hand=True)
    it.failed("pool", FailureKind.STREAM_BROKEN, moved=True, away=True)
    assert it.next(view(back_in_s=0.25, restarts=True, committed=True)) == WaitForRestart(RESUME.wait_s)
    it.waited(1.5, back=True)
    assert it.next(view("pool", back_in_s=0.0, restarts=True, committed=True)) == TryBackend("pool")
    it.failed("pool", FailureKind.STREAM_BROKEN, moved=True, away=True)
    long_away = view(back_in_s=20.0, restarts=True, committed=True)
    assert it.next(long_away) == WaitForRestart(RESUME.max_wait_s - RESUME.wait_s + 1.5)


def test_an_engine_that_comes_back_in_vain_is_left_to_the_other_legs() -> None:
    it = course(("far", DEGRADED))
    there = view("gpu", "far", back_in_s=0.0, restarts=True)
    steps: list[Step | None] = []
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=False)
    while (step := it.next(there)) != TryBackend("far"):
        steps.append(step)
        if isinstance(step, WaitForRestart):
            it.waited(step.timeout_s, back=True)
        else:
            it.failed("gpu", FailureKind.ENGINE_DEAD, moved=False)
    assert steps.count(TryBackend("gpu")) == 2


def test_the_last_call_for_an_answer_is_another_legs_where_there_is_one() -> None:
    for able, last in ((("gpu", "far"), TryBackend("far")), (("gpu",), TryBackend("gpu"))):
        it = course(("far", DEGRADED))
        steps: list[Step | None] = []
        for _ in range(MAX_SEAMS):
            it.failed("gpu", FailureKind.STREAM_BROKEN, moved=True)
            steps.append(it.next(view(*able, committed=True)))
        assert steps == [TryBackend("gpu")] * (MAX_SEAMS - 1) + [last]


def test_patience_is_spent_once_for_all_waits() -> None:
    it = course((DEGRADED,))
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    soon = view("gpu", back_in_s=1.0, restarts=True)
    assert it.next(soon) == WaitForRestart(RESUME.wait_s)
    it.waited(RESUME.wait_s - 0.5, back=True)  # half a second was enough
    assert it.next(soon) == TryBackend("gpu")
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    assert it.next(soon) == WaitForRestart(RESUME.wait_s)
    it.waited(0.0, back=False)
    assert it.next(soon) == WaitForRestart(RESUME.max_wait_s - 0.5 - RESUME.wait_s)


def test_who_has_a_part_of_an_answer_is_given_no_kept_text() -> None:
    it = course()
    it.failed("gpu", FailureKind.STREAM_BROKEN, moved=False)
    assert it.next(view(committed=True)) is None


STEPS = st.sampled_from(list(FailureKind))


@given(st.lists(st.tuples(STEPS, st.booleans(), st.booleans()), min_size=60, max_size=60), st.booleans())
def test_every_course_ends(outcomes: list[tuple[FailureKind, bool, bool]], committed: bool) -> None:
    it = course()
    it.failed("gpu", FailureKind.ENGINE_DEAD, moved=True)
    tries, waited_s, step = 0, 0.0, None
    for kind, moved, back in outcomes:
        step = it.next(view("gpu", "twin", "far", back_in_s=1.0, restarts=True, committed=committed))
        if step is None or step == ServeStored(DEGRADED):
            break
        tries, waited_s = _apply(it, step, kind, moved=moved, back=back, tries=tries, waited_s=waited_s)
    assert step is None or step == ServeStored(DEGRADED)
    assert tries <= MAX_SEAMS + len(LEGS)
    assert waited_s <= RESUME.max_wait_s


def _apply(
    it: FallbackPolicy, step: Step, kind: FailureKind, *, moved: bool, back: bool, tries: int, waited_s: float
) -> tuple[int, float]:
    if isinstance(step, TryBackend):
        it.failed(step.backend, kind, moved=moved)
        return tries + 1, waited_s
    if isinstance(step, WaitForRestart):
        used_s = step.timeout_s / 2 if back else step.timeout_s
        it.waited(step.timeout_s - used_s, back=back)
        return tries, waited_s + used_s
    it.gave_nothing(step.leg)
    return tries, waited_s
