"""The asyncio shell: no slot leaks, each waiter is woken or refused, whenever a task is cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from admission.controller import AdmissionController
from admission.errors import Refused
from admission.events import AdmissionEvent, Admitted, FirstToken, RefusedEvent, SlotOutcome
from admission.queue import LOOK_EVERY_S, Slot
from admission.values import AdmissionLimits, BackendLoad, Demand, Reason
from gateway.batches.capacity import IdleCapacity
from tests.admission.gate_rig import DEMAND, IDLE, ask, plain
from tests.virtual_time import in_virtual_time, loop_time, virtual_time


@dataclass
class Rig:
    """A controller with a load that the test sets; its clock is the event loop's."""

    load: BackendLoad | None = IDLE
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    events: list[AdmissionEvent] = field(default_factory=list)
    slot: Slot | None = None

    def __post_init__(self) -> None:
        self.controller = AdmissionController(
            self.limits,
            load=lambda _: self.load,
            clock=loop_time,
            emit=self.events.append,
            random=random.Random(1),
        )

    @property
    def in_flight(self) -> int:
        return self.controller.gate("local").in_flight

    @property
    def queued(self) -> int:
        return self.controller.gate("local").queued

    async def hold(self, until: asyncio.Event, demand: Demand = DEMAND) -> str:
        async with self.controller.admit(demand) as self.slot:
            await until.wait()
        return demand.tenant


def outcome_of(slot: Slot) -> SlotOutcome:
    """Return the outcome of a slot whose block has ended."""
    assert slot.ended is not None
    return slot.ended[0]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_slot_is_given_at_once_while_there_is_room() -> None:
    rig = Rig()
    async with rig.controller.admit(DEMAND) as slot:
        assert (slot.ticket.demand.backend, slot.max_tokens, slot.shrunk) == ("local", 50, False)
        assert rig.in_flight == 1
    assert rig.in_flight == 0
    assert [type(event) for event in rig.events] == [Admitted]


async def test_a_waiter_gets_the_slot_as_soon_as_one_is_given_back() -> None:
    rig, done = Rig(load=structs.replace(IDLE, max_running=1)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(rig.hold(done))
        await settle()
        second = group.create_task(rig.hold(done, ask(tenant="second")))
        await settle()
        assert (rig.in_flight, rig.queued) == (1, 1)
        done.set()
    assert (first.result(), second.result()) == ("acme", "second")
    waited = [event.waited_s for event in rig.events if isinstance(event, Admitted)]
    assert waited[0] == 0.0 and waited[1] > 0.0


async def test_a_waiter_is_woken_when_the_engine_reports_room() -> None:
    rig, done = Rig(load=structs.replace(IDLE, running=4, max_running=4)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        assert (rig.in_flight, rig.queued) == (0, 1)
        rig.load = IDLE
        rig.controller.wake("local")
        await settle()
        assert (rig.in_flight, rig.queued) == (1, 0)
        done.set()


def test_a_waiter_is_woken_when_other_callers_leave_a_backend_that_reports_no_steps() -> None:
    async def scenario() -> float:
        rig = Rig(load=structs.replace(IDLE, running=4, max_running=4), limits=plain(max_wait_s=5.0))
        asyncio.get_running_loop().call_later(1.0, setattr, rig, "load", IDLE)
        async with rig.controller.admit(DEMAND) as slot:
            return slot.waited_s

    assert 1.0 <= in_virtual_time(scenario()) <= 1.0 + LOOK_EVERY_S


async def test_gates_have_the_backends_current_load_although_no_request_comes() -> None:
    rig = Rig()
    async with rig.controller.admit(DEMAND):
        rig.load = structs.replace(IDLE, running=40, kv_usage=0.97)
    free = IdleCapacity(lambda: rig.controller.gates, asyncio.get_running_loop().time, 0.1)
    assert free.room() == 0
    rig.load = IDLE
    assert free.room() > 1 and rig.controller.gates["local"].work.memory.usage(0.0)[0] == 0.0


async def test_a_waiter_is_refused_when_its_wait_budget_ends_without_another_event() -> None:
    rig, done = (
        Rig(limits=plain(max_wait_s=0.05), load=structs.replace(IDLE, max_running=1)),
        asyncio.Event(),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        with pytest.raises(Refused) as caught:
            async with rig.controller.admit(DEMAND):
                raise AssertionError("there was no room")
        done.set()
    assert caught.value.reason is Reason.WAIT_EXCEEDED
    assert caught.value.estimated_wait_s >= 0.05
    [refused] = [event for event in rig.events if isinstance(event, RefusedEvent)]
    assert refused.queued


async def test_a_cancelled_waiter_leaves_the_line_at_once() -> None:
    rig, done = Rig(load=structs.replace(IDLE, max_running=1)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        waiter = group.create_task(rig.hold(done))
        await settle()
        waiter.cancel()
        await settle()
        assert (rig.in_flight, rig.queued) == (1, 0)
        done.set()


async def test_a_waiter_cancelled_in_the_turn_it_is_handed_on_gives_the_slot_to_the_next() -> None:
    rig = Rig(load=structs.replace(IDLE, max_running=1))
    done, released = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        second = group.create_task(rig.hold(released))
        third = group.create_task(rig.hold(released, ask(tenant="third")))
        await settle()
        done.set()
        await asyncio.sleep(0)  # the first leaves: the second's future is resolved, its task has not run
        second.cancel()
        await settle()
        assert (rig.in_flight, rig.queued) == (1, 0)
        released.set()
    assert second.cancelled() and third.result() == "third"
    assert rig.in_flight == 0


async def test_a_request_of_a_higher_class_displaces_a_waiter_which_gets_the_reason() -> None:
    limits = plain(max_queue=1, priority_factor=1.0)
    rig, done = Rig(limits=limits, load=structs.replace(IDLE, max_running=1)), asyncio.Event()

    async def low() -> Reason:
        with pytest.raises(Refused) as caught:
            await rig.hold(done, ask(priority=-1))
        return caught.value.reason

    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        pushed = group.create_task(low())
        await settle()
        group.create_task(rig.hold(done, ask(priority=1)))
        await settle()
        assert pushed.result() is Reason.LOW_PRIORITY_SHED
        done.set()


async def test_a_request_that_would_be_late_displaces_no_waiter() -> None:
    limits = plain(max_queue=1, priority_factor=1.0)
    rig, done = Rig(limits=limits, load=structs.replace(IDLE, max_running=1)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        waiter = group.create_task(rig.hold(done, ask(tenant="low", priority=-1)))
        await settle()
        with pytest.raises(Refused) as caught:
            await rig.hold(done, ask(priority=1, deadline=asyncio.get_running_loop().time()))
        assert (caught.value.reason, rig.queued) == (Reason.WAIT_EXCEEDED, 1)
        done.set()
    assert waiter.result() == "low"


async def test_a_request_refused_for_its_first_token_alone_is_told_when_that_was_expected() -> None:
    rig = Rig(limits=plain())
    for _ in range(2):
        async with rig.controller.admit(DEMAND) as slot:
            await asyncio.sleep(0.05)
            slot.first_token(cached_tokens=0)
    with pytest.raises(Refused, match=r"wait_exceeded \(first token expected after [1-9]\d* ms\)"):
        await rig.hold(asyncio.Event(), ask(deadline=asyncio.get_running_loop().time() + 0.01))


async def test_a_refusal_reserves_nothing_and_says_when_to_return() -> None:
    rig = Rig(load=structs.replace(IDLE, running=4, waiting=200), limits=plain())
    with pytest.raises(Refused) as caught:
        async with rig.controller.admit(DEMAND):
            raise AssertionError("there was no room")
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after_s > 0
    assert (rig.in_flight, rig.queued) == (0, 0)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (Slot.succeeded, SlotOutcome.SUCCEEDED),
        (Slot.ignored, SlotOutcome.IGNORED),
    ],
)
async def test_the_first_outcome_of_a_slot_counts(end: Callable[[Slot], None], outcome: SlotOutcome) -> None:
    rig = Rig()
    async with rig.controller.admit(DEMAND) as slot:
        end(slot)
        slot.succeeded()
        slot.ignored()
    assert outcome_of(slot) is outcome


async def test_an_exception_drops_the_slot_and_passes_through() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="mine"):
        async with rig.controller.admit(DEMAND) as slot:
            raise ValueError("mine")
    assert outcome_of(slot) is SlotOutcome.DROPPED
    assert rig.in_flight == 0


async def test_a_cancellation_anywhere_in_the_block_gives_the_slot_back_as_ignored() -> None:
    rig, never = Rig(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(rig.hold(never))
        await settle()
        task.cancel()
    assert rig.slot is not None and outcome_of(rig.slot) is SlotOutcome.IGNORED
    assert rig.in_flight == 0


async def test_an_admission_is_entered_once() -> None:
    admission = Rig().controller.admit(DEMAND)
    async with admission:
        with pytest.raises(AttributeError):
            await admission.__aenter__()


async def test_backends_are_counted_apart() -> None:
    rig = Rig(load=structs.replace(IDLE, max_running=1))
    async with rig.controller.admit(DEMAND), rig.controller.admit(ask(backend="other")):
        assert (rig.in_flight, rig.controller.gate("other").in_flight) == (1, 1)


async def test_a_backend_that_tells_no_load_is_bounded_by_its_slots_alone() -> None:
    rig, done = Rig(load=None, limits=plain(max_in_flight=2)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(rig.hold(done))
        await settle()
        assert (rig.in_flight, rig.queued) == (2, 1)
        done.set()


async def test_refused_requests_leave_nothing_behind_however_many() -> None:
    """20,000 refusals; ``benchmarks.admission_cost --refused 1000000`` is the full test."""
    rig, done = Rig(limits=plain(max_queue=0), load=structs.replace(IDLE, max_running=1)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        gate = rig.controller.gate("local")
        for number in range(20_000):
            gate.offer(ask(tenant=f"t{number}", kind=number), 0.0)
        assert rig.queued == 0
        assert not gate.tickets and len(gate.queue._leaving) <= 1
        done.set()


async def test_random_traffic_with_cancellations_leaves_nothing_and_never_passes_the_limit() -> None:
    rig = Rig(load=structs.replace(IDLE, max_running=3), limits=plain(max_queue=1000, max_wait_s=60.0))
    draw = random.Random(11)
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        demand = ask(tenant=f"t{number % 4}", priority=draw.randint(-1, 1))
        async with rig.controller.admit(demand) as slot:
            most = max(most, rig.in_flight)
            await asyncio.sleep(draw.random() * 0.002)
            slot.first_token(0)
            await asyncio.sleep(draw.random() * 0.002)

    tasks: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(200):
            tasks.append(group.create_task(one(number)))
            if number % 3 == 0:
                draw.choice(tasks).cancel()
            await asyncio.sleep(0)
    assert most == 3
    assert (rig.in_flight, rig.queued) == (0, 0)
    assert len(rig.controller.gate("local").forecast) == 0
    admitted = sum(isinstance(event, Admitted) for event in rig.events)
    assert admitted >= 100


async def test_backends_on_one_engine_share_its_places() -> None:
    rig, done = Rig(load=structs.replace(IDLE, max_running=2)), asyncio.Event()
    rig.controller = AdmissionController(
        rig.limits,
        load=lambda _: rig.load,
        clock=lambda: asyncio.get_running_loop().time(),
        emit=rig.events.append,
        random=random.Random(1),
        engine_of={"local": "engine", "alias": "engine"},
    )
    async with asyncio.TaskGroup() as group:
        for backend in ("local", "alias", "local"):
            group.create_task(rig.hold(done, ask(backend=backend)))
        await settle()
        assert (rig.in_flight, rig.controller.gate("alias").in_flight, rig.queued) == (2, 2, 1)
        assert list(rig.controller.gates) == ["engine"]
        done.set()
    assert (rig.in_flight, rig.queued) == (0, 0)


@virtual_time
async def test_an_engine_that_steps_is_alive_even_when_its_figures_stay_the_same() -> None:
    rig, done = Rig(limits=plain(stale_s=0.6, fresh_s=0.3, stale_in_flight=1)), asyncio.Event()
    rig.load = structs.replace(IDLE, running=1, max_running=3)
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        await asyncio.sleep(0.7)
        gate, now = rig.controller.gate("local"), asyncio.get_running_loop().time
        assert gate.work.capacity(now()) == 1
        rig.controller.wake("local")
        assert gate.work.capacity(now()) == 3
        done.set()


async def test_the_load_after_the_last_step_is_known_also_while_no_request_waits() -> None:
    rig = Rig()
    rig.controller.gate("local")
    for used in range(1, 50):
        rig.load = structs.replace(IDLE, kv_usage=used / 1000)
        rig.controller.wake("local")
    assert rig.controller.gate("local").work.signals.load == rig.load


async def test_the_first_token_event_has_the_estimated_and_the_measured_time() -> None:
    rig = Rig()
    async with rig.controller.admit(DEMAND) as slot:
        await asyncio.sleep(0.01)
        slot.first_token(0)
        slot.first_token(0)
    [first] = [event for event in rig.events if isinstance(event, FirstToken)]
    assert first.estimated_s == 0.0 and first.took_s >= 0.009


@pytest.mark.parametrize(
    ("at_first", "at_the_end", "uncached"), [(None, 75, 25), (40, 75, 60), (None, None, 100)]
)
async def test_a_cached_part_that_is_only_told_at_the_end_is_learned_then(
    at_first: int | None, at_the_end: int | None, uncached: int
) -> None:
    rig = Rig()
    async with rig.controller.admit(DEMAND) as slot:
        slot.first_token(at_first)
        slot.succeeded(at_the_end)
    async with rig.controller.admit(DEMAND) as slot:
        assert slot.ticket.uncached == uncached


async def test_one_who_waits_goes_on_when_the_factor_rises_again() -> None:
    rig, done = Rig(load=structs.replace(IDLE, max_running=2)), asyncio.Event()
    rig.controller.scale("local", 0.5)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(rig.hold(done))
        await settle()
        assert (rig.in_flight, rig.queued) == (1, 1)
        rig.controller.scale("local", 1.0)
        await settle()
        assert (rig.in_flight, rig.queued, rig.controller.gate("local").work.scale) == (2, 0, 1.0)
        done.set()


async def test_an_admission_event_beyond_the_forecast_has_its_reason() -> None:
    rig = Rig(load=structs.replace(IDLE, total_blocks=5))
    async with rig.controller.admit(DEMAND):
        pass
    [admitted] = [event for event in rig.events if isinstance(event, Admitted)]
    assert admitted.beyond == "idle_engine"


async def test_the_gate_of_a_backend_that_is_gone_is_dropped_once_its_last_request_has_ended() -> None:
    rig, done = Rig(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.hold(done))
        await settle()
        rig.controller.keep(["other"])
        assert list(rig.controller.gates) == ["local"]
        done.set()
    rig.controller.keep(["local"])
    assert list(rig.controller.gates) == ["local"]
    rig.controller.keep(["other"])
    assert not rig.controller.gates
