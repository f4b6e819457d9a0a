"""Degenerate answers are retried, ended or failed; other answers pass unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.backends.port import Backend, Completion, DeltaSink, Work
from gateway.contracts.events import Delta, Reasoning
from gateway.contracts.values import FinishReason, Sampling, Usage
from gateway.generation.output_guard import INSPECT_EVERY, OutputGuard
from resilience.blame import Blame
from resilience.degenerate import CHARS_PER_TOKEN, Action, DegenerateLimits, Sign
from resilience.events import Degenerated
from resilience.failures import BackendFailure, FailureKind
from tests.scripted import NoSink, Script, ScriptedBackend, streamed

LIMITS = DegenerateLimits(repeat_tokens=40, cycle_tokens=64, cycle_length=4)
LATEST = 40 + 2 * INSPECT_EVERY
SOUND = Script(tuple(f"{number} " for number in range(300)), token_ids=tuple(range(300)))
STUCK = Script(("It", " is") + (" no",) * 400, cached_tokens=3, token_ids=(1, 2) + (7,) * 400)
GARBLED = Script(("fine ",) * 20 + ("\ufffd",) * 50, token_ids=tuple(range(70)))


@dataclass
class GuardRig(NoSink):
    """An output guard, its events and notes, and the deltas that it passed on."""

    action: Action
    may_retry: bool = True
    events: list[Degenerated] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    async def run(
        self, *scripts: Script, n: int = 1, temperature: float | None = None, **asked: Any
    ) -> Completion:
        self.backend = ScriptedBackend(scripts=scripts)
        guard = OutputGuard(self.action, LIMITS, self.events.append, Blame(lambda: 0.0))
        sampling = Sampling(max_tokens=500, n=n, temperature=temperature, **asked)
        return await self.inspect(guard, self.backend, Work("g", (1, 2, 3, 4), (), sampling))

    async def inspect(self, guard: OutputGuard, backend: Backend, work: Work) -> Completion:
        stream = streamed(work, self)
        return await guard.generate(
            backend, work, stream, stream.take, may_retry=lambda: self.may_retry, note=self.notes.append
        )

    async def delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    @property
    def tokens(self) -> int:
        return sum(delta.tokens for delta in self.deltas)


@pytest.mark.parametrize("asked", [{"echo": True}, {"ignore_eos": True}])
async def test_an_answer_that_repeats_by_the_callers_choice_is_not_inspected(asked: dict[str, Any]) -> None:
    rig = GuardRig(Action.END)
    completion = await rig.run(STUCK, **asked)
    assert (completion.finish_reason, rig.tokens, rig.events) == (FinishReason.STOP, 402, [])
    assert (await rig.run(STUCK, ignore_eos=False)).finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("action", Action)
async def test_a_sound_answer_passes_untouched(action: Action) -> None:
    rig = GuardRig(action)
    completion = await rig.run(SOUND)
    assert completion == Completion(FinishReason.STOP, Usage(4, 300, 0))
    assert "".join(delta.text for delta in rig.deltas) == "".join(SOUND.pieces)
    assert (rig.events, rig.notes) == ([], [])


async def test_nonsense_fails_so_that_it_is_made_again_while_that_is_possible() -> None:
    rig = GuardRig(Action.RETRY)
    with pytest.raises(BackendFailure) as caught:
        await rig.run(STUCK)
    assert (caught.value.kind, caught.value.no_retry_here) == (FailureKind.DEGENERATE_OUTPUT, False)
    assert rig.events == [Degenerated("local", Sign.REPETITION, "retry", rig.tokens)]
    assert rig.backend.active == 0


@pytest.mark.parametrize(
    ("action", "may_retry", "temperature"),
    [(Action.END, True, None), (Action.RETRY, False, None), (Action.RETRY, True, 0.0)],
    ids=["told to end", "something was given out", "greedy"],
)
async def test_a_degenerate_answer_that_cannot_be_retried_ends_with_what_there_is(
    action: Action, may_retry: bool, temperature: float | None
) -> None:
    rig = GuardRig(action, may_retry=may_retry)
    completion = await rig.run(STUCK, temperature=temperature)
    assert completion.finish_reason is FinishReason.ERROR
    assert completion.usage == Usage(4, rig.tokens, 3)
    assert 40 <= rig.tokens <= LATEST
    assert rig.events == [Degenerated("local", Sign.REPETITION, "end", rig.tokens)]
    assert rig.notes == [f"the answer was ended after {rig.tokens} tokens because it repeats itself"]
    assert rig.backend.active == 0


async def test_nonsense_fails_for_good_when_told_to_abort() -> None:
    rig = GuardRig(Action.ABORT)
    with pytest.raises(BackendFailure) as caught:
        await rig.run(STUCK)
    assert (caught.value.kind, caught.value.no_retry_here) == (FailureKind.DEGENERATE_OUTPUT, True)
    assert "no" not in str(caught.value).split(), "nothing of the answer is repeated"


async def test_replacement_characters_are_nonsense_too() -> None:
    rig = GuardRig(Action.END)
    completion = await rig.run(GARBLED)
    assert completion.finish_reason is FinishReason.ERROR
    assert rig.events[0].sign is Sign.REPLACEMENT
    assert rig.tokens <= 20 + 8 + INSPECT_EVERY


async def test_a_guard_that_is_off_inspects_nothing() -> None:
    rig = GuardRig(Action.OFF)
    completion = await rig.run(STUCK)
    assert (completion.finish_reason, completion.usage.output_tokens) == (FinishReason.STOP, 402)


async def test_the_backends_own_failure_stays_its_own() -> None:
    failure = BackendFailure(FailureKind.CUDA_OOM, "no memory")
    rig = GuardRig(Action.RETRY)
    with pytest.raises(BackendFailure) as caught:
        await rig.run(replace(SOUND, failure=failure))
    assert caught.value is failure
    assert rig.events == []


async def test_of_several_texts_none_is_cut_while_another_is_sound() -> None:
    class Two(ScriptedBackend):
        """One text is stuck, the other counts."""

        async def generate(self, work: Work, out: DeltaSink) -> Completion:
            for number in range(200):
                await out(Delta(" no", 1, index=0, token_ids=(7,)))
                await out(Delta(f"{number}", 1, index=1, token_ids=(number,)))
            return Completion(FinishReason.STOP, Usage(4, 400), others=(FinishReason.STOP,))

    rig = GuardRig(Action.END)
    guard = OutputGuard(rig.action, LIMITS, rig.events.append, Blame(lambda: 0.0))
    work = Work("g", (1, 2, 3, 4), (), Sampling(max_tokens=500, n=2))
    completion = await rig.inspect(guard, Two(), work)
    assert (completion.finish_reason, rig.tokens) == (FinishReason.STOP, 400)


@pytest.mark.parametrize("kind", [Reasoning, Delta])
async def test_an_answer_without_ids_is_inspected_by_its_text_reasoning_included(kind: type[Delta]) -> None:
    rig = GuardRig(Action.END)
    before = (Reasoning("First", 1), Delta("Second", 1))
    completion = await rig.run(Script(events=(*before, *[kind(" no", 1)] * 400)))
    assert (completion.finish_reason, rig.events[0].sign) == (FinishReason.ERROR, Sign.REPETITION)
    assert len(rig.deltas) < 2 + 64 * CHARS_PER_TOKEN


async def test_a_call_is_inspected_from_its_own_first_token_and_nothing_after_its_end() -> None:
    rig = GuardRig(Action.END)
    guard = OutputGuard(rig.action, LIMITS, rig.events.append, Blame(lambda: 0.0))
    work = Work("g", (1, 2, 3, 4), (), Sampling(max_tokens=500))
    stream = streamed(work, rig)
    for _ in range(60):
        await stream.take(Delta(" no", 1, token_ids=(7,)))
    backend = ScriptedBackend(scripts=(SOUND,))
    completion = await guard.generate(
        backend, work, stream, stream.take, may_retry=lambda: True, note=rig.notes.append
    )
    for _ in range(60):
        await stream.take(Delta(" no", 1, token_ids=(7,)))
    assert (completion.finish_reason, rig.tokens, rig.events) == (FinishReason.STOP, 420, [])


async def test_when_all_texts_are_nonsense_each_is_ended() -> None:
    rig = GuardRig(Action.END)
    completion = await rig.run(STUCK, n=2)
    assert (completion.finish_reason, completion.others) == (FinishReason.ERROR, (FinishReason.ERROR,))


async def test_a_reader_that_fails_is_not_taken_for_nonsense() -> None:
    class Gone(GuardRig):
        async def delta(self, delta: Delta) -> None:
            raise ConnectionResetError

    rig = Gone(Action.END)
    with pytest.raises(ConnectionResetError):
        await rig.run(SOUND)
    assert rig.events == []
