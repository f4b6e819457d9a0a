"""The fallback chain for each failure: what is tried, where, with which change, and what is never retried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from accounting.keys import KeyLimits
from budgeting.values import EvidenceChunk
from gateway.backends.port import Backend, BackendState, Completion, Continue, DeltaSink, Work
from gateway.contracts.values import Contract, FinishReason, GenerateRequest, Sampling
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import CALLER, JourneyRig
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

OOM = Script((), failure=BackendFailure(FailureKind.CUDA_OOM, "no memory"))
NAN = Script((), failure=BackendFailure(FailureKind.NAN_OUTPUT, "not a number"))
DEAD = Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))


async def test_after_out_of_memory_the_prompt_is_shortened_and_the_answer_says_so(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(OOM, Script(), route={"budgets": {"retrieval": 1400}})
    chunks = tuple(EvidenceChunk(f"m{i}", "catalog", "Vinland Saga has 27 volumes. " * 8) for i in range(12))
    answer = (await rig.run(ask(chunks=chunks))).answer
    assert answer is not None and answer.fallback is None
    first, second = rig.backends["local"].calls
    assert len(second.token_ids) <= len(first.token_ids) // 2
    [warning] = answer.warnings
    assert str(len(first.token_ids)) in warning and str(len(second.token_ids)) in warning
    counts = answer.budget
    sent = counts.system + counts.retrieval + counts.recent_turns + counts.older_summary
    assert sent == len(second.token_ids) == answer.usage.input_tokens == rig.outbox.rows[0].input_tokens
    assert counts.dropped_chunks or counts.cut_chunks


async def test_a_part_of_an_answer_to_a_shortened_prompt_is_billed_and_counted_with_the_prompt_that_was_sent(
    build_rig: Build, ask: Ask
) -> None:
    broken = Script(breaks_after=2, failure=BackendFailure(FailureKind.STREAM_BROKEN, "gone"))
    rig = build_rig(OOM, broken, route={"budgets": {"retrieval": 1400}})
    chunks = tuple(EvidenceChunk(f"m{i}", "catalog", "Vinland Saga has 27 volumes. " * 8) for i in range(12))
    caller = replace(CALLER, limits=KeyLimits(tokens_per_minute=10_000))
    await rig.run(ask(chunks=chunks, stream=True, caller=caller))
    first, second = rig.backends["local"].calls
    [row] = rig.outbox.rows
    assert len(second.token_ids) <= len(first.token_ids) // 2
    assert (row.billable_input_tokens, row.billable_output_tokens) == (len(second.token_ids), 2)
    assert rig.records[0].input_tokens == row.input_tokens
    used = await rig.journey.limiter.used(caller.key_id, caller.limits)
    assert used == {"tokens_per_minute": len(second.token_ids) + 2}


async def test_a_prompt_is_shortened_once_and_what_cannot_be_cut_is_sent_as_it_is(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(OOM, OOM, Script())
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.warnings == ()
    assert len({work.token_ids for work in rig.backends["local"].calls}) == 1


async def test_an_answer_to_a_shortened_prompt_is_not_remembered(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        OOM,
        Script(),
        DEAD,
        route={"fallback": ["response_cache", "degraded"], "budgets": {"retrieval": 1400}},
    )
    chunks = tuple(EvidenceChunk(f"m{i}", "catalog", "Vinland Saga has 27 volumes. " * 8) for i in range(12))
    await rig.run(ask(chunks=chunks))
    answer = (await rig.run(ask(chunks=chunks))).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"


@pytest.mark.parametrize("seed", [None, 7])
async def test_after_a_nan_another_seed_is_tried(build_rig: Build, ask: Ask, seed: int | None) -> None:
    rig = build_rig(NAN, Script())
    answer = (await rig.run(ask(sampling=Sampling(seed=seed, temperature=0.7)))).answer
    assert answer is not None and answer.fallback is None
    first, second = rig.backends["local"].calls
    assert first.sampling.seed == seed
    assert second.sampling.seed not in (None, seed)


@pytest.mark.parametrize("kind", [FailureKind.CUDA_OOM, FailureKind.ENGINE_DEAD])
async def test_a_leg_on_the_same_engine_is_passed_over(build_rig: Build, ask: Ask, kind: FailureKind) -> None:
    failing = Script((), failure=BackendFailure(kind, "it is the device", no_retry_here=True))
    names = ("local", "twin", "far")
    rig = build_rig(
        backends=[
            ScriptedBackend(name, scripts=[failing if name == "local" else Script()]) for name in names
        ],
        route={"fallback": ["twin", "far"]},
        on_engine=["local", "twin"],
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.backend_name == "far"
    assert answer.fallback is not None and answer.fallback.reason == kind.value
    assert rig.backends["twin"].calls == []


async def test_a_leg_that_is_not_ready_is_passed_over(build_rig: Build, ask: Ask) -> None:
    backends = [
        ScriptedBackend("local", scripts=[DEAD]),
        ScriptedBackend("away", state=BackendState.STARTING),
        ScriptedBackend("far"),
    ]
    rig = build_rig(backends=backends, route={"fallback": ["away", "far"]})
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.backend_name == "far"


async def test_the_degraded_text_comes_last_wherever_it_stands(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[ScriptedBackend("local", scripts=[DEAD]), ScriptedBackend("far")],
        route={"fallback": ["degraded", "far"]},
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.backend_name == "far"


async def test_a_stream_of_the_degraded_text_names_the_model_that_the_whole_answer_names(
    build_rig: Build, ask: Ask
) -> None:
    local = ScriptedBackend("local", scripts=(DEAD,), state=BackendState.STARTING)
    rig = build_rig(backends=[local])
    sink = await rig.run(ask(stream=True, contract=Contract.CHAT))
    assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEGRADED
    assert sink.text == sink.answer.output_text
    assert sink.models[-1:] == [sink.answer.model] == [local.model]


async def test_bad_input_is_never_answered_by_a_fallback(build_rig: Build, ask: Ask) -> None:
    bad = Script((), failure=BackendFailure(FailureKind.INVALID_INPUT, "no"))
    rig = build_rig(
        backends=[ScriptedBackend("local", scripts=[bad]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"]},
    )
    sink = await rig.run(ask())
    assert sink.error is not None and rig.backends["far"].calls == []


async def test_a_request_that_its_backend_refuses_has_a_row_without_tokens(
    build_rig: Build, ask: Ask
) -> None:
    bad = Script((), failure=BackendFailure(FailureKind.INVALID_INPUT, "no"))
    rig = build_rig(bad)
    await rig.run(ask())
    [row] = rig.outbox.rows
    assert (row.error_code, row.backend_name, row.input_tokens) == ("invalid_request", "local", 0)


CUT = Script(breaks_after=1, failure=BackendFailure(FailureKind.STREAM_BROKEN, "cut"))
TWO = Sampling(n=2, temperature=1.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "held"])
async def test_an_undelivered_broken_answer_that_cannot_be_resumed_is_requested_once_more(
    build_rig: Build, ask: Ask, stream: bool
) -> None:
    rig = build_rig(
        backends=[ScriptedBackend("local", scripts=[CUT, Script()]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"], "resume": {"commit_chunks": 8, "commit_ms": 1000}},
    )
    answer = (await rig.run(ask(sampling=TWO, stream=stream))).answer
    assert answer is not None and answer.backend_name == "local" and answer.fallback is None
    assert answer.output_text == "Hello there."
    assert rig.backends["far"].calls == []
    assert [row.output_tokens for row in rig.outbox.rows] == [answer.usage.output_tokens]
    assert rig.in_use() == []


async def test_an_undelivered_answer_broken_twice_goes_to_the_next_leg(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[ScriptedBackend("local", scripts=[CUT]), ScriptedBackend("far")],
        route={"fallback": ["far", "degraded"]},
    )
    answer = (await rig.run(ask(sampling=TWO))).answer
    assert answer is not None and answer.backend_name == "far"
    assert len(rig.backends["local"].calls) == 2


class RenamedBackend(ScriptedBackend):
    """One of a pool whose workers list a second model during the second call."""

    fleet: dict[str, Backend]

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        if len(self.calls) == 1:
            del self.fleet[self.name]
            self.name = "local/first"
            self.fleet[self.name] = self
        return await super().generate(work, out)


async def test_an_answer_is_resumed_by_a_backend_whose_name_changes_meanwhile(
    build_rig: Build, ask: Ask
) -> None:
    broken = Script(breaks_after=1, failure=BackendFailure(FailureKind.STREAM_BROKEN, "cut"))
    local = RenamedBackend(scripts=[broken, broken, Script()], continues=frozenset({Continue.TEXT}))
    rig = build_rig(backends=[local])
    local.fleet = dict(rig.backends)
    rig.journey.fallback.backends = local.fleet
    sink = await rig.run(ask(stream=True))
    assert sink.answer is not None and sink.answer.output_text == sink.text == "Hello there."
    assert (len(local.calls), sink.answer.fallback) == (3, None)
