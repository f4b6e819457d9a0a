"""Blame for NaN output: that of one adapter does not count against the backend."""

from __future__ import annotations

import pytest

from adapters.values import Adapter
from gateway.backends.port import Work
from gateway.contracts.values import Sampling
from gateway.generation.output_guard import OutputGuard
from resilience.blame import MAX_WEIGHTS, WINDOW_S, Blame
from resilience.degenerate import Action, DegenerateLimits
from resilience.failures import BackendFailure, FailureKind
from tests.scripted import NoSink, Script, ScriptedBackend, streamed


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_adapter_alone_is_to_blame_however_often() -> None:
    blame = Blame(Clock())
    assert all(blame.not_numbers("local", "bad") for _ in range(100))


def test_a_nan_of_the_base_model_counts_against_the_backend() -> None:
    blame = Blame(Clock())
    blame.answered("local", "good")
    assert not blame.not_numbers("local", None)


def test_several_bad_adapters_without_any_answer_count_against_the_backend() -> None:
    blame = Blame(Clock())
    assert blame.not_numbers("local", "one")
    assert not blame.not_numbers("local", "two")
    assert not blame.not_numbers("local", "one")


@pytest.mark.parametrize("other", [None, "good"])
def test_two_bad_adapters_are_to_blame_while_others_are_answered(other: str | None) -> None:
    blame = Blame(Clock())
    blame.answered("local", other)
    assert blame.not_numbers("local", "one") and blame.not_numbers("local", "two")


def test_old_answers_and_answers_of_another_backend_do_not_count() -> None:
    clock = Clock()
    blame = Blame(clock)
    blame.answered("local", None)
    blame.answered("worker", None)
    assert blame.not_numbers("local", "one")
    clock.now = WINDOW_S + 1
    assert blame.not_numbers("local", "one")
    blame.answered("worker", None)
    assert not blame.not_numbers("local", "two")


def test_the_number_of_remembered_adapters_is_bounded() -> None:
    blame = Blame(Clock())
    for number in range(2 * MAX_WEIGHTS):
        blame.answered("local", f"adapter-{number}")
    assert len(blame._answered_at["local"]) == MAX_WEIGHTS


@pytest.mark.parametrize("action", [Action.OFF, Action.RETRY])
@pytest.mark.parametrize(("adapter", "counts", "param"), [("bad", False, "adapter_id"), (None, True, None)])
async def test_an_adapters_nonsense_does_not_count_against_its_backend(
    action: Action, adapter: str | None, counts: bool, param: str | None
) -> None:
    failing = Script(("x",), failure=BackendFailure(FailureKind.NAN_OUTPUT, "no number"))
    guard = OutputGuard(action, DegenerateLimits(), lambda event: None, Blame(Clock()))
    named = None if adapter is None else Adapter(adapter, 1, "demo", "/nowhere")
    work = Work("g", (1,), (), Sampling(max_tokens=4), adapter=named)
    backend, stream = ScriptedBackend(scripts=(failing,)), streamed(work, NoSink())
    with pytest.raises(BackendFailure) as caught:
        await guard.generate(backend, work, stream, stream.take, may_retry=lambda: False, note=ignore)
    assert (caught.value.kind, caught.value.counts) == (FailureKind.NAN_OUTPUT, counts)
    assert caught.value.param == param


def ignore(line: str) -> None:
    """Drops the note."""
