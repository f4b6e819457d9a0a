"""The retry loop: retries by the policy table, invisible, in time, and never two attempts at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation.retry_loop import AttemptBounds, RetryLoop
from resilience.errors import DeadlinePassed
from resilience.events import AttemptFailed, Recovered, ResilienceEvent, Retried, RetryRefused
from resilience.failures import POLICIES, BackendFailure, FailureKind
from resilience.retry import Attempt, RetryPolicy
from resilience.retry_budget import MOST, CallBudget, RetryBudget

FAR = 1e6
RETRIED = [kind for kind, policy in POLICIES.items() if policy.retries_same]
NOT_RETRIED = [kind for kind, policy in POLICIES.items() if not policy.retries_same]


@dataclass
class RetryRig:
    """A retry loop whose clock moves only by its sleeps and attempts, and a record of what it did."""

    seed: int = 1
    now: float = 100.0
    slept: list[float] = field(default_factory=list)
    events: list[ResilienceEvent] = field(default_factory=list)
    attempts: int = 0
    running: int = 0
    delivered: bool = False
    budget: RetryBudget | None = None
    calls: CallBudget = field(default_factory=CallBudget)
    others: bool = False

    def __post_init__(self) -> None:
        self.loop = RetryLoop(
            RetryPolicy(self.budget or RetryBudget(), random.Random(self.seed), self.events.append),
            clock=lambda: self.now,
            sleep=self._sleep,
            emit=self.events.append,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def run(self, *script: BaseException | str, takes_s: float = 0.0, deadline: float = FAR) -> str:
        """Runs attempts that end in turn as scripted."""
        ends = list(script)

        async def attempt(_: Attempt) -> str:
            assert self.running == 0
            self.running += 1
            try:
                self.attempts += 1
                self.now += takes_s
                await asyncio.sleep(0)
                end = ends.pop(0)
                if isinstance(end, BaseException):
                    raise end
                return end
            finally:
                self.running -= 1

        return await self.loop.run(
            attempt,
            AttemptBounds(
                "local",
                self.calls,
                lambda: self.delivered,
                lambda: True,
                deadline,
                deadline,
                lambda: self.others,
            ),
        )


def bounds(
    deadline: float = FAR, begun: Callable[[], bool] = lambda: True, first: float = FAR
) -> AttemptBounds:
    return AttemptBounds("local", CallBudget(), lambda: False, begun, deadline, first)


def failure(kind: FailureKind, *, retry_after_s: float | None = None) -> BackendFailure:
    return BackendFailure(kind, "scripted", retry_after_s=retry_after_s)


async def test_a_first_success_is_returned_without_a_word() -> None:
    rig = RetryRig()
    assert await rig.run("ok") == "ok"
    assert (rig.attempts, rig.slept, rig.events) == (1, [], [])


@pytest.mark.parametrize("kind", RETRIED)
async def test_a_failure_is_retried_as_often_as_its_policy_says(kind: FailureKind) -> None:
    times = POLICIES[kind].retries_same
    rig = RetryRig()
    assert await rig.run(*[failure(kind)] * times, "ok") == "ok"
    assert rig.attempts == times + 1

    rig = RetryRig()
    with pytest.raises(BackendFailure) as caught:
        await rig.run(*[failure(kind)] * (times + 5))
    assert (rig.attempts, caught.value.kind) == (times + 1, kind)


@pytest.mark.parametrize("kind", NOT_RETRIED)
async def test_what_the_policy_does_not_retry_is_raised_at_once(kind: FailureKind) -> None:
    rig = RetryRig()
    original = failure(kind)
    with pytest.raises(BackendFailure) as caught:
        await rig.run(original, "ok")
    assert caught.value is original
    assert (rig.attempts, rig.slept) == (1, [])


async def test_waits_double_with_at_most_a_tenth_of_jitter() -> None:
    rig = RetryRig()
    await rig.run(*[failure(FailureKind.CUDA_OOM)] * 3, "ok")
    for waited, plain in zip(rig.slept, [0.1, 0.2, 0.4], strict=True):
        assert plain <= waited <= plain * 1.1
    again = RetryRig()
    await again.run(*[failure(FailureKind.CUDA_OOM)] * 3, "ok")
    assert again.slept == rig.slept


async def test_a_fixed_wait_stays_fixed() -> None:
    rig = RetryRig()
    await rig.run(*[failure(FailureKind.WORKER_RESTARTED)] * 2, "ok")
    assert rig.slept == [5.0, 5.0]


async def test_a_backend_that_asks_for_a_longer_wait_gets_it_up_to_the_policys_longest() -> None:
    rig = RetryRig()
    assert await rig.run(failure(FailureKind.CUDA_OOM, retry_after_s=4.0), "ok") == "ok"
    assert rig.slept == [4.0]
    with pytest.raises(BackendFailure):
        await RetryRig().run(failure(FailureKind.CUDA_OOM, retry_after_s=6.0), "ok")


async def test_after_the_first_delivered_token_nothing_is_retried() -> None:
    rig = RetryRig(delivered=True)
    with pytest.raises(BackendFailure):
        await rig.run(failure(FailureKind.CUDA_OOM), "ok")
    assert rig.attempts == 1
    assert rig.events == [AttemptFailed("local", FailureKind.CUDA_OOM, 1, True, "BackendFailure")]


async def test_a_failure_permits_no_more_retries_than_have_been_made_for_others() -> None:
    rig = RetryRig()
    with pytest.raises(BackendFailure) as caught:
        await rig.run(failure(FailureKind.CUDA_OOM), failure(FailureKind.NAN_OUTPUT), "ok")
    assert (rig.attempts, caught.value.kind) == (2, FailureKind.NAN_OUTPUT)


async def test_other_exceptions_are_classified_and_then_retried_like_any_failure() -> None:
    rig = RetryRig()
    assert await rig.run(MemoryError(), "ok") == "ok"
    with pytest.raises(BackendFailure) as caught:
        await RetryRig().run(KeyError("a prompt"))
    assert caught.value.kind is FailureKind.INTERNAL
    assert isinstance(caught.value.__cause__, KeyError)
    assert "a prompt" not in str(caught.value)


async def test_events_are_emitted_in_order() -> None:
    rig = RetryRig()
    await rig.run(failure(FailureKind.NAN_OUTPUT), "ok")
    assert rig.events == [
        AttemptFailed("local", FailureKind.NAN_OUTPUT, 1, False, "BackendFailure"),
        Retried("local", FailureKind.NAN_OUTPUT),
        Recovered("local", FailureKind.NAN_OUTPUT),
    ]


async def test_an_attempt_gets_the_failure_of_the_one_before_it() -> None:
    rig, tries = RetryRig(), []

    async def attempt(this: Attempt) -> str:
        tries.append(this)
        if this.number < 3:
            raise failure(FailureKind.CUDA_OOM)
        return "ok"

    await rig.loop.run(attempt, bounds())
    oom = FailureKind.CUDA_OOM
    assert tries == [Attempt(1), Attempt(2, oom), Attempt(3, oom)]


async def test_a_final_failure_is_not_tried_again_whatever_its_policy() -> None:
    rig = RetryRig()
    with pytest.raises(BackendFailure):
        await rig.run(BackendFailure(FailureKind.DEGENERATE_OUTPUT, "nonsense", no_retry_here=True), "ok")
    assert rig.attempts == 1


async def test_an_empty_retry_budget_ends_the_retries_and_says_so() -> None:
    rig = RetryRig(budget=RetryBudget(share=0.0, per_second=0.0, most=1.0))
    with pytest.raises(BackendFailure):
        await rig.run(*[failure(FailureKind.CUDA_OOM)] * 3, "ok")
    assert rig.attempts == 2
    assert rig.events[-1] == RetryRefused("local", FailureKind.CUDA_OOM)


async def test_the_budget_is_not_asked_when_nothing_would_be_retried_anyway() -> None:
    budget = RetryBudget(share=0.0, per_second=0.0, most=1.0)
    rig = RetryRig(budget=budget)
    for wrong in (failure(FailureKind.INVALID_INPUT), failure(FailureKind.CUDA_OOM, retry_after_s=9.0)):
        with pytest.raises(BackendFailure):
            await rig.run(wrong)
    assert budget.remaining("local", rig.now) == 1.0
    assert not [event for event in rig.events if isinstance(event, RetryRefused)]


async def test_a_retry_takes_one_of_the_requests_calls() -> None:
    rig = RetryRig(calls=CallBudget(extra=1))
    with pytest.raises(BackendFailure) as caught:
        await rig.run(*[failure(FailureKind.CUDA_OOM)] * 3, "ok")
    assert (rig.attempts, caught.value.kind) == (2, FailureKind.CUDA_OOM)
    with pytest.raises(BackendFailure, match="all its calls"):
        await rig.run("ok")
    assert rig.attempts == 2


async def test_under_an_outage_all_requests_together_add_a_tenth_of_the_load() -> None:
    rig = RetryRig(budget=RetryBudget(share=0.1, per_second=0.0, most=3.0))
    for _ in range(500):
        rig.calls = CallBudget()
        with pytest.raises(BackendFailure):
            await rig.run(*[failure(FailureKind.CUDA_OOM)] * 4)
    assert 500 + 50 <= rig.attempts <= 500 + 50 + 3


async def test_a_connection_that_breaks_after_something_was_delivered_is_a_broken_stream() -> None:
    rig = RetryRig(delivered=True)
    with pytest.raises(BackendFailure) as caught:
        await rig.run(ConnectionResetError())
    assert caught.value.kind is FailureKind.STREAM_BROKEN


async def test_a_deadline_that_has_passed_begins_no_attempt() -> None:
    rig = RetryRig()
    with pytest.raises(DeadlinePassed, match="attempt 0"):
        await rig.run("ok", deadline=100.0)
    assert rig.attempts == 0


async def test_a_wait_that_would_pass_the_deadline_is_not_begun() -> None:
    rig = RetryRig()
    with pytest.raises(BackendFailure) as caught:
        await rig.run(failure(FailureKind.WORKER_RESTARTED), "ok", deadline=105.0)
    assert (rig.attempts, rig.slept, caught.value.kind) == (1, [], FailureKind.WORKER_RESTARTED)


@pytest.mark.parametrize(
    ("others", "deadline_s", "attempts"),
    [(True, 59.0, 1), (True, 65.0, 2), (False, 59.0, 2)],
    ids=["too short", "long enough", "no other backend"],
)
async def test_a_retry_with_less_time_than_the_attempt_took_is_left_to_another_backend(
    others: bool, deadline_s: float, attempts: int
) -> None:
    rig = RetryRig(others=others)
    slow = failure(FailureKind.TIMEOUT)
    with pytest.raises(BackendFailure):
        await rig.run(slow, slow, slow, takes_s=30.0, deadline=rig.now + deadline_s)
    assert rig.attempts == attempts


async def test_a_deadline_in_the_middle_of_an_attempt_cancels_and_awaits_it() -> None:
    cleaned_up = False

    async def attempt(_: Attempt) -> str:
        nonlocal cleaned_up
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            cleaned_up = True
        return "late"

    rig = RetryRig()
    with pytest.raises(DeadlinePassed, match="attempt 1"):
        await rig.loop.run(attempt, bounds(100.02))
    assert cleaned_up
    assert rig.events == []


async def test_an_attempt_that_discards_the_output_before_it_ends_in_time_for_a_fallback() -> None:
    begun = False

    async def attempt(this: Attempt) -> str:
        nonlocal begun
        begun = this.number == 1
        if this.number == 1:
            raise failure(FailureKind.NAN_OUTPUT)
        return await _forever(this)

    async with asyncio.timeout(30):
        with pytest.raises(DeadlinePassed, match="attempt 2"):
            await RetryRig().loop.run(attempt, bounds(5000.0, lambda: begun, first=100.5))


async def test_an_attempt_that_answers_its_cancellation_with_an_error_still_met_the_deadline() -> None:
    async def attempt(_: Attempt) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionResetError from None
        return "late"

    with pytest.raises(DeadlinePassed):
        await RetryRig().loop.run(attempt, bounds(100.01))


async def test_an_attempts_own_timeout_is_a_failure_and_not_the_deadline() -> None:
    rig = RetryRig()
    assert await rig.run(TimeoutError(), "ok", deadline=1000.0) == "ok"
    assert isinstance(rig.events[0], AttemptFailed)
    assert rig.events[0].kind is FailureKind.TIMEOUT


async def _forever(_: Attempt) -> str:
    await asyncio.sleep(3600)
    return "never"


async def _out_of_memory(_: Attempt) -> str:
    raise failure(FailureKind.CUDA_OOM)


async def _sleep_forever(_: float) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("attempt", [_forever, _out_of_memory], ids=["in an attempt", "between attempts"])
async def test_a_cancellation_passes_through_untouched(attempt: Callable[[Attempt], Awaitable[str]]) -> None:
    events: list[ResilienceEvent] = []
    policy = RetryPolicy(RetryBudget(), random.Random(1), events.append)
    retries = RetryLoop(policy, clock=lambda: 0.0, sleep=_sleep_forever, emit=events.append)
    ended: list[BaseException] = []

    async def work() -> None:
        try:
            await retries.run(attempt, bounds(5000.0))
        except BaseException as error:
            ended.append(error)
            raise

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
    assert [type(error) for error in ended] == [asyncio.CancelledError]
    if attempt is _forever:
        assert events == [AttemptFailed("local", FailureKind.CANCELLED_BY_CLIENT, 1, False, "CancelledError")]


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(list(FailureKind)), max_size=8),
    takes_s=st.floats(0, 3),
    allowed_s=st.just(FAR) | st.floats(0.01, 30),
    seed=st.integers(0, 5),
)
def test_attempts_and_waits_are_bounded_whatever_fails(
    kinds: list[FailureKind], takes_s: float, allowed_s: float, seed: int
) -> None:
    rig = RetryRig(seed=seed)
    deadline = rig.now + allowed_s
    script = [failure(kind) for kind in kinds]
    try:
        asyncio.run(rig.run(*script, "ok", takes_s=takes_s, deadline=deadline))
    except DeadlinePassed:
        assert allowed_s < FAR
    except BackendFailure as error:
        assert error is script[rig.attempts - 1]
    assert rig.attempts <= 4
    assert all(0 <= waited <= 10 for waited in rig.slept)
    assert rig.now <= deadline + takes_s  # only an attempt may end after the deadline, not a wait
    assert rig.running == 0


@pytest.mark.parametrize("silent", [True, False])
async def test_an_attempt_ends_early_when_nothing_has_begun_and_goes_on_when_something_has(
    silent: bool,
) -> None:
    rig, begun = RetryRig(), asyncio.Event()

    async def attempt(_: Attempt) -> str:
        if not silent:
            begun.set()
        await asyncio.sleep(60 if silent else 0.05)
        return "whole"

    run = rig.loop.run(attempt, bounds(rig.now + 60, begun.is_set, first=rig.now + 0.01))
    if not silent:
        assert await run == "whole"
        return
    with pytest.raises(DeadlinePassed, match="attempt 1"):
        await run


async def test_a_retry_that_could_not_begin_in_time_is_not_waited_for() -> None:
    rig = RetryRig()
    calls = 0

    async def attempt(_: Attempt) -> str:
        nonlocal calls
        calls += 1
        raise failure(FailureKind.WORKER_RESTARTED)  # its policy waits five seconds

    with pytest.raises(BackendFailure):
        await rig.loop.run(attempt, bounds(rig.now + 60, lambda: False, first=rig.now + 4))
    assert calls == 1 and rig.slept == []


def test_another_attempt_is_paid_for_by_the_budget() -> None:
    rig = RetryRig()
    afforded = sum(rig.loop.affords("local", FailureKind.STREAM_BROKEN) for _ in range(30))
    assert afforded == MOST
    types = [type(event) for event in rig.events]
    assert (types.count(Retried), types.count(RetryRefused)) == (MOST, 30 - MOST)
