"""The fallback chain for each failure: what is tried, where, with which change, and what is never retried."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from budgeting.values import EvidenceChunk
from gateway.backends.port import BackendState
from gateway.backends.scripted import Script, ScriptedBackend
from gateway.contracts.values import Contract, FinishReason, GenerateRequest, Sampling
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
    house = build_house(OOM, Script(), route={"budgets": {"retrieval": 1400}})
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
    house = build_house(
        OOM,
        Script(),
        DEAD,
        route={"fallback": ["response_cache", "degraded"], "budgets": {"retrieval": 1400}},
    )
    chunks = tuple(EvidenceChunk(f"m{i}", "catalog", "Vinland Saga has 27 volumes. " * 8) for i in range(12))
    await house.run(ask(chunks=chunks))
    answer = (await house.run(ask(chunks=chunks))).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"


@pytest.mark.parametrize("seed", [None, 7])
async def test_after_a_nan_another_seed_is_tried(build_house: Build, ask: Ask, seed: int | None) -> None:
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
    failing = Script((), failure=BackendFailure(kind, "it is the device", no_retry_here=True))
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


async def test_a_stream_of_the_degraded_text_names_the_model_that_the_whole_answer_names(
    build_house: Build, ask: Ask
) -> None:
    local = ScriptedBackend("local", scripts=(DEAD,), state=BackendState.STARTING)
    house = build_house(backends=[local])
    sink = await house.run(ask(stream=True, contract=Contract.CHAT))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEGRADED
    assert sink.text == sink.answer.output_text
    assert sink.models[-1:] == [sink.answer.model] == [local.model]


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
async def test_an_undelivered_broken_answer_that_cannot_be_resumed_is_requested_once_more(
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


async def test_an_undelivered_answer_broken_twice_goes_to_the_next_leg(build_house: Build, ask: Ask) -> None:
    house = build_house(
        backends=[ScriptedBackend("local", scripts=[CUT]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"]},
    )
    answer = (await house.run(ask(sampling=TWO))).answer
    assert answer is not None and answer.backend_name == "far"
    assert len(house.backends["local"].calls) == 2
