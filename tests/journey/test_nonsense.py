"""A degenerate answer in a whole journey: what the caller gets, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.contracts.values import FinishReason, GenerateRequest, Sampling
from resilience.degenerate import Action
from resilience.events import Degenerated
from resilience.failures import FailureKind
from tests.journey.rig import JourneyRig
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

STUCK = Script(("It", " is") + (" no",) * 400, token_ids=(1, 2) + (7,) * 400)
SOUND = Script(("Vinland", " Saga"), token_ids=(3, 4))
SAMPLED = Sampling(temperature=0.7, seed=5)


async def test_an_unsent_degenerate_answer_is_retried_with_another_seed(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(STUCK, SOUND, nonsense=Action.RETRY)
    sink = await rig.run(ask(stream=False, sampling=SAMPLED))
    assert sink.answer is not None
    assert (sink.answer.output_text, sink.answer.finish_reason) == ("Vinland Saga", FinishReason.STOP)
    first, second = rig.backends["local"].calls
    assert first.sampling.seed == 5 != second.sampling.seed
    assert second.partial is None, "nonsense is not gone on with"
    [row] = rig.outbox.rows
    assert row.output_tokens == 2, "what was thrown away is not billed"
    assert rig.in_use() == []


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=0.0)], ids=["sampled", "greedy"])
async def test_a_degenerate_stream_ends_with_what_was_sent_and_a_warning(
    build_rig: Build, ask: Ask, sampling: Sampling
) -> None:
    rig = build_rig(STUCK, SOUND, nonsense=Action.RETRY)
    sink = await rig.run(ask(stream=True, sampling=sampling))
    answer = sink.answer
    assert answer is not None, sink.error
    assert answer.finish_reason is FinishReason.ERROR
    assert sink.text == answer.output_text
    assert answer.usage.output_tokens == len(sink.deltas) < 300
    assert any("repeats itself" in warning for warning in answer.warnings)
    assert len(rig.backends["local"].calls) == 1
    assert rig.outbox.rows[0].output_tokens == answer.usage.output_tokens
    assert rig.in_use() == []


async def test_an_answer_degenerate_twice_ends_with_what_there_is(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(STUCK, STUCK, nonsense=Action.RETRY)
    sink = await rig.run(ask(stream=False, sampling=SAMPLED))
    assert sink.answer is not None
    assert sink.answer.finish_reason is FinishReason.ERROR
    assert sink.answer.output_text.startswith("It is no no")
    assert [event.action for event in rig.events if isinstance(event, Degenerated)] == ["retry", "end"]


async def test_when_told_to_abort_the_next_leg_answers(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[
            ScriptedBackend("local", scripts=[STUCK]),
            ScriptedBackend("other", scripts=[SOUND]),
        ],
        route={"fallback": ["other"]},
        nonsense=Action.ABORT,
    )
    sink = await rig.run(ask(stream=False))
    assert sink.answer is not None and sink.answer.fallback is not None
    assert sink.answer.fallback.reason == FailureKind.DEGENERATE_OUTPUT.value
    assert sink.answer.output_text == "Vinland Saga"
    assert len(rig.backends["local"].calls) == 1


async def test_when_told_to_abort_a_stream_that_began_ends_in_an_error(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(
        backends=[
            ScriptedBackend("local", scripts=[STUCK]),
            ScriptedBackend("other", scripts=[SOUND]),
        ],
        route={"fallback": ["other"]},
        nonsense=Action.ABORT,
    )
    sink = await rig.run(ask(stream=True))
    assert sink.answer is None and sink.error is not None
    assert "degenerate_output" in sink.error.message
    assert rig.backends["other"].calls == [], "what goes on with a repetition repeats"
    assert rig.in_use() == []


async def test_a_tenant_whose_prompts_bring_nonsense_does_not_close_the_backend_to_others(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(*[STUCK] * 30, SOUND, nonsense=Action.ABORT)
    for number in range(30):
        sink = await rig.run(ask(stream=False, request_id=f"r{number}", generation_id=f"g{number}"))
        assert sink.answer is not None and sink.answer.finish_reason is FinishReason.DEGRADED
    sink = await rig.run(ask(stream=False))
    assert sink.answer is not None and sink.answer.output_text == "Vinland Saga"
