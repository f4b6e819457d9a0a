"""Several engines under one name: the gate fills each, and one slow answer counts for one engine only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.limit import SETTLE_S, AdaptiveLimit
from admission.prefill import PrefillBacklog
from admission.ticket import AdmissionTicket
from admission.values import BackendLoad, Demand, Reason
from tests.admission.gate_rig import plain

# Seconds of prefill for a prompt token, as learned of an engine.
RATE = 0.001


def demand(now: float, tokens: int = 1000) -> Demand:
    return Demand("pool", "t", 0, tokens, 100, arrived_at=now)


def pool(workers: int, waiting: int = 0, running: int = 0) -> BackendLoad:
    return BackendLoad(running=running, waiting=waiting, max_running=64 * workers, workers=workers)


def test_while_an_engine_has_no_prompt_nothing_is_ahead() -> None:
    backlog = PrefillBacklog()
    backlog.set_engines(3, 0.0, RATE)
    for number in range(3):
        assert backlog.ahead(0.0, RATE) == 0
        backlog.add(number, 900, 0.0, RATE)
    assert backlog.ahead(0.0, RATE) == 900
    assert backlog.ahead(0.3, RATE) == 600, "all three compute"
    backlog.add(3, 300, 0.3, RATE)
    assert backlog.ahead(0.3, RATE) == 700
    backlog.done(0, 0.9, RATE)
    # The fourth has started at 0.9; the second and third should be complete at 1.0.
    assert backlog.ahead(1.0, RATE) == pytest.approx((300 - 100) / 3, abs=1)
    for number in (1, 2):
        backlog.done(number, 1.0, RATE)
    assert backlog.ahead(1.0, RATE) == 0 and backlog.total == 300
    backlog.done(3, 1.0, RATE)
    assert (backlog.total, backlog.ahead(1.0, RATE)) == (0, 0)
    with pytest.raises(KeyError):
        backlog.done(3, 1.0, RATE)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["add", "done"]), st.integers(1, 3000), st.integers(0, 2000)), max_size=40
    ),
)
def test_what_is_ahead_is_what_a_count_of_each_prompt_says(
    workers: int, moves: list[tuple[str, int, int]]
) -> None:
    backlog, now = PrefillBacklog(), 0.0
    backlog.set_engines(workers, now, RATE)
    begun: dict[int, tuple[int, float]] = {}
    after: dict[int, int] = {}
    for number, (kind, tokens, later_ms) in enumerate(moves):
        now += later_ms / 1000
        if kind == "add":
            backlog.add(number, tokens, now, RATE)
            after[number] = tokens
        elif begun or after:
            one = random.Random(tokens).choice([*begun, *after])
            backlog.done(one, now, RATE)
            begun.pop(one, None)
            after.pop(one, None)
        while after and len(begun) < workers:
            first = next(iter(after))
            begun[first] = (after.pop(first), now)
        left = sum(max(0.0, tokens - (now - since) / RATE) for tokens, since in begun.values())
        expected = (left + sum(after.values())) / workers if len(begun) == workers else 0.0
        assert backlog.ahead(now, RATE) == pytest.approx(expected, abs=2)


def test_a_pool_is_handed_a_prompt_for_each_engine_at_once() -> None:
    gate = BackendGate(plain(max_prefill_tokens=512), random=random.Random(1))
    gate.report(pool(100), 0.0)
    for _ in range(150):
        offered = gate.offer(demand(0.0), 0.0)
        assert isinstance(offered, AdmissionTicket)
        gate.pump(0.0)
    assert gate.in_flight == 100, "one an engine; before, half of them had none"


def test_an_engine_that_hangs_with_prompts_does_not_hold_up_the_pools_others() -> None:
    gate = BackendGate(plain(max_prefill_tokens=2000), random=random.Random(1))
    gate.report(pool(2), 0.0)

    def handed_on(now: float) -> AdmissionTicket:
        offered = gate.offer(demand(now), now)
        assert isinstance(offered, AdmissionTicket)
        gate.pump(now)
        return offered

    held = [handed_on(0.0) for _ in range(3)]  # they are on the engine that hangs
    last = handed_on(0.1)
    gate.first_token(last, 0.5, 0)
    held += [handed_on(0.6) for _ in range(2)]
    assert gate.queued, "the hanging engine's prompts are taken for prompts that will be computed"
    gate.pump(7.0)
    assert not gate.queued
    for ticket in held:
        gate.release(ticket, SlotOutcome.DROPPED, 8.0, output_tokens=0)
    gate.release(last, SlotOutcome.SUCCEEDED, 8.0, output_tokens=1)
    assert (gate.in_flight, gate.work.prefill.total) == (0, 0)


def test_a_late_answer_of_a_pool_shrinks_the_limit_by_one_engines_part() -> None:
    limit, alone = AdaptiveLimit(6400), AdaptiveLimit(64)
    alone.record(in_slo=False, in_flight=50, now=0.0)
    limit.record(in_slo=False, in_flight=5000, now=0.0, workers=100)
    assert alone.value == 45
    assert limit.value == 6400 - (6400 - 4500) // 100
    before = limit.value
    limit.record(in_slo=False, in_flight=5000, now=SETTLE_S / 200, workers=100)
    assert limit.value == before, "as often as each engine's own would shrink, and no oftener"
    limit.record(in_slo=False, in_flight=5000, now=SETTLE_S / 100, workers=100)
    assert limit.value < before


def test_a_pool_grows_by_each_engines_good_answers() -> None:
    limit = AdaptiveLimit(200)
    limit.record(in_slo=False, in_flight=100, now=0.0)
    assert limit.value == 90
    for _ in range(9):
        limit.record(in_slo=True, in_flight=90, now=1.0, workers=10)
    assert limit.value == 91


def test_the_queue_of_a_pool_is_bounded_for_each_engine() -> None:
    limits = plain(max_queue=4, max_wait_s=1e6)
    for workers in (1, 10):
        gate = BackendGate(limits, random=random.Random(1))
        # Full of other clients' requests: none can be handed on, and none waits inside the engines.
        gate.report(pool(workers, running=64 * workers), 0.0)
        taken = 0
        while isinstance(offered := gate.offer(demand(0.0), 0.0), AdmissionTicket):
            gate.pump(0.0)
            taken += 1
        assert taken == 4 * workers
        assert offered.reason is Reason.QUEUE_FULL


def test_what_waits_inside_other_engines_counts_for_each_of_them() -> None:
    gate = BackendGate(plain(), random=random.Random(1))
    gate.report(pool(100, waiting=100, running=500), 0.0)
    assert gate.depth == 1, "not a hundred: new requests are not refused as by a full queue"
    assert isinstance(gate.offer(demand(0.0), 0.0), AdmissionTicket)
