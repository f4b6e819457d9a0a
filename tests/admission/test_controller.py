"""The admission controller: its decisions, in order, and slots that never leak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from admission.controller import AdmissionController, Slot
from admission.errors import Refused
from admission.events import AdmissionEvent, Admitted, Outcome, RefusedEvent, Released
from admission.values import Demand, Limits, Load, Reason

IDLE = Load(running=0, waiting=0, kv_usage=0.0, total_blocks=1000, block_size=16, max_running=32)
DEMAND = Demand(
    backend="local", tenant="acme", priority=0, input_tokens=100, max_output_tokens=50, arrived_at=0.0
)


@dataclass
class Desk:
    """A controller with its surroundings in hand."""

    load: Load | None = IDLE
    limits: Limits = field(default_factory=Limits)
    now: float = 0.0
    told: list[AdmissionEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = AdmissionController(
            self.limits, load=lambda _: self.load, clock=lambda: self.now, emit=self.told.append
        )

    @property
    def in_flight(self) -> int:
        return self.controller.in_flight("local")

    def reason(self, demand: Demand = DEMAND) -> Reason | None:
        return self.controller.decide(demand, self.load, self.now).reason

    async def serve(self, seconds: float, demand: Demand = DEMAND) -> None:
        async with self.controller.admit(demand):
            self.now += seconds

    def outcomes(self) -> list[Outcome]:
        return [event.outcome for event in self.told if isinstance(event, Released)]


def test_an_idle_backend_takes_a_request() -> None:
    assert Desk().reason() is None


@pytest.mark.parametrize(
    ("load", "demand", "reason"),
    [
        (replace(IDLE, kv_usage=0.93), DEMAND, Reason.MEMORY_PRESSURE),
        (IDLE, replace(DEMAND, input_tokens=3601), Reason.TOKEN_BUDGET_EXCEEDED),
        (replace(IDLE, running=32, waiting=100), DEMAND, Reason.QUEUE_FULL),
        (IDLE, replace(DEMAND, deadline=0.0), Reason.WAIT_EXCEEDED),
        (
            replace(IDLE, running=32, waiting=200, kv_usage=0.99),
            replace(DEMAND, input_tokens=9999, deadline=-1.0),
            Reason.MEMORY_PRESSURE,
        ),
        (
            replace(IDLE, running=32, waiting=200),
            replace(DEMAND, input_tokens=9999, deadline=-1.0),
            Reason.TOKEN_BUDGET_EXCEEDED,
        ),
        (replace(IDLE, running=32, waiting=200), replace(DEMAND, deadline=-1.0), Reason.QUEUE_FULL),
    ],
)
def test_the_first_reason_that_holds_is_told(load: Load, demand: Demand, reason: Reason) -> None:
    assert Desk(load).reason(demand) is reason


@pytest.mark.parametrize(
    ("load", "demand"),
    [
        (replace(IDLE, kv_usage=0.929), DEMAND),
        (IDLE, replace(DEMAND, input_tokens=3600)),
        (replace(IDLE, running=32, waiting=99), DEMAND),
        (IDLE, replace(DEMAND, deadline=0.001)),
    ],
)
def test_just_below_each_threshold_a_request_passes(load: Load, demand: Demand) -> None:
    assert Desk(load).reason(demand) is None


@pytest.mark.parametrize(
    ("waiting", "normal", "high"), [(99, True, True), (119, False, True), (120, False, False)]
)
def test_high_priority_has_a_fifth_more_room_in_the_queue(waiting: int, normal: bool, high: bool) -> None:
    desk = Desk(replace(IDLE, running=32, waiting=waiting))
    assert (desk.reason() is None) == normal
    assert (desk.reason(replace(DEMAND, priority=1)) is None) == high


async def test_the_wait_estimate_comes_from_measured_service_times() -> None:
    desk = Desk()
    await desk.serve(4.0)
    desk.load = replace(IDLE, running=32, waiting=15)
    decision = desk.controller.decide(DEMAND, desk.load, desk.now)
    assert decision.admitted
    assert decision.estimated_wait_s == pytest.approx(15 * 4.0 / 32)


@pytest.mark.parametrize(
    ("waiting", "normal", "high"), [(15, True, True), (16, False, True), (20, False, False)]
)
async def test_a_wait_beyond_the_budget_is_refused_high_priority_has_a_fifth_more(
    waiting: int, normal: bool, high: bool
) -> None:
    desk = Desk()
    await desk.serve(4.0)  # a turnover of 0.125 s, a budget of 2.0 and 2.4 s
    desk.load = replace(IDLE, running=32, waiting=waiting)
    assert (desk.reason() is None) == normal
    assert (desk.reason(replace(DEMAND, priority=1)) is None) == high


async def test_a_wait_that_would_pass_the_requests_own_deadline_is_refused() -> None:
    desk = Desk()
    await desk.serve(4.0)
    desk.load = replace(IDLE, running=32, waiting=8)  # a second
    assert desk.reason(replace(DEMAND, deadline=desk.now + 1.0)) is Reason.WAIT_EXCEEDED
    assert desk.reason(replace(DEMAND, deadline=desk.now + 1.1)) is None


async def test_time_in_the_engines_own_queue_is_not_service() -> None:
    desk = Desk()
    async with desk.controller.admit(DEMAND) as slot:
        desk.now += 5.0
        slot.succeeded(queue_wait_s=4.0)
        desk.now += 100.0  # a slow reader is no service either
    desk.load = replace(IDLE, running=32, waiting=32)
    assert desk.controller.decide(DEMAND, desk.load, desk.now).estimated_wait_s == pytest.approx(1.0)


@pytest.mark.parametrize("end", [Slot.dropped, Slot.ignored])
async def test_what_did_not_succeed_teaches_no_service_time(end: Callable[[Slot], None]) -> None:
    desk = Desk()
    async with desk.controller.admit(DEMAND) as slot:
        desk.now += 50.0
        end(slot)
    desk.load = replace(IDLE, running=32, waiting=50)
    assert desk.controller.decide(DEMAND, desk.load, desk.now).estimated_wait_s == 0.0


async def test_a_burst_between_two_reports_does_not_pass() -> None:
    desk = Desk()
    slots = []
    with pytest.raises(Refused) as caught:
        for _ in range(1000):
            admission = desk.controller.admit(DEMAND)
            await admission.__aenter__()
            slots.append(admission)
    # 32 places in the batch and 100 in the queue: the engine said "idle" all the time
    assert (caught.value.reason, len(slots), desk.in_flight) == (Reason.QUEUE_FULL, 132, 132)
    for admission in slots:
        await admission.__aexit__(None, None, None)
    assert desk.in_flight == 0


async def test_a_burst_of_long_prompts_between_two_reports_stops_at_the_memory_threshold() -> None:
    desk = Desk()
    long = replace(DEMAND, input_tokens=1599)  # 100 of 1000 blocks each
    slots = []
    with pytest.raises(Refused) as caught:
        for _ in range(100):
            admission = desk.controller.admit(long)
            await admission.__aenter__()
            slots.append(admission)
    assert (caught.value.reason, len(slots)) == (Reason.MEMORY_PRESSURE, 10)
    desk.load = replace(IDLE, running=10, kv_usage=0.9)  # the next report knows them
    assert desk.reason(DEMAND) is None
    for admission in slots:
        await admission.__aexit__(None, None, None)


async def test_a_backend_that_tells_no_load_is_bounded_by_the_own_slots_alone() -> None:
    desk = Desk(load=None, limits=Limits(max_queue=3))
    await desk.serve(60.0)
    async with (
        desk.controller.admit(DEMAND),
        desk.controller.admit(DEMAND),
        desk.controller.admit(DEMAND),
    ):
        assert desk.reason() is Reason.QUEUE_FULL
    assert desk.reason() is None


async def test_backends_are_counted_apart() -> None:
    desk = Desk(load=None, limits=Limits(max_queue=1))
    async with desk.controller.admit(DEMAND):
        assert desk.reason() is Reason.QUEUE_FULL
        assert desk.reason(replace(DEMAND, backend="other")) is None
        assert (desk.in_flight, desk.controller.in_flight("other")) == (1, 0)


async def test_a_refusal_reserves_nothing_and_says_when_to_return() -> None:
    desk = Desk()
    await desk.serve(4.0)
    desk.load = replace(IDLE, running=32, waiting=100)
    with pytest.raises(Refused) as caught:
        async with desk.controller.admit(DEMAND):
            raise AssertionError("the block of a refused request runs")
    assert desk.in_flight == 0
    assert caught.value.retry_after_s == pytest.approx(12.5)
    event = desk.told[-1]
    assert isinstance(event, RefusedEvent)
    assert (event.reason, event.queue_depth) == (Reason.QUEUE_FULL, 100)


@pytest.mark.parametrize(("service_s", "retry_s"), [(0.001, 0.1), (1000.0, 30.0)])
async def test_the_time_to_return_is_bounded(service_s: float, retry_s: float) -> None:
    desk = Desk()
    await desk.serve(service_s)
    desk.load = replace(IDLE, running=32, waiting=100)
    assert desk.controller.decide(DEMAND, desk.load, desk.now).retry_after_s == retry_s


async def test_a_slot_tells_what_it_was_given_for() -> None:
    desk = Desk(now=7.0)
    async with desk.controller.admit(DEMAND) as slot:
        assert (slot.backend, slot.demand, slot.admitted_at, slot.estimated_wait_s) == (
            "local",
            DEMAND,
            7.0,
            0.0,
        )
    first = desk.told[0]
    assert isinstance(first, Admitted)
    assert (first.tenant, first.in_flight) == ("acme", 1)


async def test_leaving_normally_is_a_success() -> None:
    desk = Desk()
    await desk.serve(1.0)
    assert desk.outcomes() == [Outcome.SUCCEEDED]


async def test_an_exception_drops_the_slot_and_passes_through() -> None:
    desk = Desk()
    with pytest.raises(ConnectionError):
        async with desk.controller.admit(DEMAND):
            raise ConnectionError
    assert (desk.outcomes(), desk.in_flight) == ([Outcome.DROPPED], 0)


async def test_the_first_word_about_a_slot_counts() -> None:
    desk = Desk()
    with pytest.raises(ConnectionError):
        async with desk.controller.admit(DEMAND) as slot:
            slot.ignored()
            slot.succeeded()
            raise ConnectionError
    slot.dropped()
    assert desk.outcomes() == [Outcome.IGNORED]


async def test_a_cancellation_anywhere_in_the_block_gives_the_slot_back_as_ignored() -> None:
    for awaits in range(6):
        desk = Desk()

        async def work(desk: Desk = desk) -> None:
            async with desk.controller.admit(DEMAND):
                for _ in range(4):
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work())
            for _ in range(awaits):
                await asyncio.sleep(0)
            task.cancel()
        assert desk.in_flight == 0
        assert desk.outcomes() in ([], [Outcome.IGNORED], [Outcome.SUCCEEDED])
        if 2 <= awaits <= 4:
            assert desk.outcomes() == [Outcome.IGNORED]


async def test_an_admission_is_entered_once() -> None:
    admission = Desk().controller.admit(DEMAND)
    async with admission:
        with pytest.raises(RuntimeError):
            await admission.__aenter__()


async def test_a_subscriber_that_fails_leaves_no_slot() -> None:
    def fail(_: AdmissionEvent) -> None:
        raise RuntimeError("the subscriber is broken")

    controller = AdmissionController(Limits(), load=lambda _: IDLE, clock=lambda: 0.0, emit=fail)
    with pytest.raises(RuntimeError, match="broken"):
        async with controller.admit(DEMAND):
            raise AssertionError("the block runs without a slot")
    assert controller.in_flight("local") == 0


def test_a_decision_with_a_thousand_in_flight_looks_at_no_more_than_it_must() -> None:
    desk = Desk(load=replace(IDLE, max_running=2000, total_blocks=1_000_000))

    async def fill() -> None:
        for _ in range(1000):
            await desk.controller.admit(DEMAND).__aenter__()

    asyncio.run(fill())
    decision = desk.controller.decide(DEMAND, desk.load, 0.0)
    assert decision.admitted
    assert decision.standing.kv_usage == pytest.approx(0.007)


Held = tuple[AbstractAsyncContextManager[Slot], Slot]


class Slots(RuleBasedStateMachine):
    """Any sequence of admissions, ends and reports, against a plain model of what is in flight."""

    held: Bundle[Held | None] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(limits=Limits(max_queue=5), load=replace(IDLE, max_running=3, total_blocks=40))
        self.out = 0
        self.released = 0

    @rule(
        target=held,
        tokens=st.integers(1, 400),
        priority=st.integers(-1, 1),
        deadline=st.none() | st.floats(0, 50),
    )
    def admit(self, tokens: int, priority: int, deadline: float | None) -> Held | None:
        demand = replace(DEMAND, input_tokens=tokens, priority=priority, deadline=deadline)
        expected = self.desk.controller.decide(demand, self.desk.load, self.desk.now)
        admission = self.desk.controller.admit(demand)
        try:
            slot = asyncio.run(admission.__aenter__())
        except Refused as refused:
            assert refused.reason is expected.reason
            return None
        assert expected.admitted
        self.out += 1
        return admission, slot

    @rule(
        entry=consumes(held),
        word=st.sampled_from(["", "succeeded", "dropped", "ignored"]),
        error=st.sampled_from([None, ConnectionError(), asyncio.CancelledError()]),
        after_s=st.floats(0, 10),
    )
    def leave(self, entry: Held | None, word: str, error: BaseException | None, after_s: float) -> None:
        if entry is None:
            return
        admission, slot = entry
        self.desk.now += after_s
        if word:
            getattr(slot, word)()
        for _ in range(2):  # the second exit finds nothing to give back
            asyncio.run(admission.__aexit__(type(error) if error else None, error, None))
        self.out -= 1
        self.released += 1

    @rule(
        load=st.none()
        | st.builds(
            Load,
            running=st.integers(0, 3),
            waiting=st.integers(0, 6),
            kv_usage=st.floats(0, 1),
            total_blocks=st.just(40),
            block_size=st.just(16),
            max_running=st.sampled_from([0, 3]),
        )
    )
    def report(self, load: Load | None) -> None:
        self.desk.load = load

    @invariant()
    def what_is_counted_is_what_is_out(self) -> None:
        assert self.desk.in_flight == self.out
        assert len(self.desk.outcomes()) == self.released
        assert (
            len([event for event in self.desk.told if isinstance(event, Admitted)])
            == self.out + self.released
        )


TestSlotsNeverLeak = Slots.TestCase
TestSlotsNeverLeak.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
