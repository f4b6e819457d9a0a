"""The gate: which requests are handed on, which wait, which are refused, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from admission.estimator import LEARNED_FROM
from admission.events import SlotOutcome
from admission.ladder import Rung
from admission.ticket import IDLE_ENGINE, AdmissionTicket, Hold, Refusal, TicketState
from admission.values import AdmissionLimits, BackendLoad, Demand, Reason
from tests.admission.gate_rig import DEMAND, IDLE, PLAIN, GateRig, ask, first_token_s, plain


def test_an_idle_backend_takes_a_request_at_once() -> None:
    assert GateRig().enter().state is TicketState.HANDED_ON


def test_an_idle_backend_takes_even_what_the_forecast_would_hold_back() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=10))
    assert rig.enter(ask(input_tokens=150, max_output_tokens=50)).state is TicketState.HANDED_ON


def test_requests_beyond_the_batch_wait_in_the_gate_and_not_in_the_engine() -> None:
    rig = GateRig()
    tickets = [rig.enter() for _ in range(6)]
    assert [ticket.state for ticket in tickets] == [TicketState.HANDED_ON] * 4 + [TicketState.WAITING] * 2
    assert rig.gate.hold is Hold.SLOTS
    assert rig.end(tickets[0]) == [tickets[4]]


@pytest.mark.parametrize(
    ("load", "demand", "reason"),
    [
        (structs.replace(IDLE, running=1, kv_usage=0.93), DEMAND, Reason.MEMORY_PRESSURE),
        (IDLE, ask(limits=plain(max_input_tokens=99)), Reason.TOKEN_BUDGET_EXCEEDED),
        (structs.replace(IDLE, running=4, waiting=100), DEMAND, Reason.QUEUE_FULL),
    ],
)
def test_load_from_other_clients_of_the_backend_counts_as_well(
    load: BackendLoad, demand: Demand, reason: Reason
) -> None:
    assert GateRig(load=load).reason(demand) is reason


def test_high_priority_has_a_fifth_more_room_in_the_queue() -> None:
    rig = GateRig(load=structs.replace(IDLE, running=4, waiting=110))
    assert rig.reason() is Reason.QUEUE_FULL
    assert rig.reason(ask(priority=1)) is None


def test_a_full_queue_makes_room_for_a_higher_class_by_the_newest_of_the_lowest() -> None:
    rig = GateRig(plain(max_queue=2, priority_factor=1.0))
    for _ in range(4):
        rig.enter()
    first, newest = rig.enter(ask(priority=-1)), rig.enter(ask(priority=-1))
    urgent = rig.enter(ask(priority=1))
    [gone] = rig.gate.displaced()
    assert gone is newest and gone.refusal is not None and gone.refusal.reason is Reason.LOW_PRIORITY_SHED
    assert gone.refusal.queued
    assert first.state is urgent.state is TicketState.WAITING
    assert rig.gate.displaced() == []


def test_the_queue_is_bounded_in_tokens_and_bytes_too() -> None:
    tokens = GateRig(plain(max_queue_tokens=250))
    sizes = GateRig(plain(max_queue_bytes=2_500))
    for rig, demand in ((tokens, DEMAND), (sizes, ask(size_bytes=1_000))):
        for _ in range(6):
            rig.enter(demand)
        assert rig.reason(demand) is Reason.QUEUE_FULL


def test_a_request_leaves_when_its_wait_budget_is_used_up() -> None:
    rig = GateRig()
    for _ in range(4):
        rig.enter()
    waiting = rig.enter()
    rig.now = 1.9
    assert rig.gate.expired(rig.now) == []
    assert rig.gate.queue.next_change() == pytest.approx(2.0)
    rig.now = 2.0
    assert rig.gate.expired(rig.now) == [waiting]
    assert waiting.refusal is not None and waiting.refusal.reason is Reason.WAIT_EXCEEDED
    assert rig.gate.queued == 0


def test_a_request_that_waited_for_memory_is_refused_for_memory() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=20))
    rig.enter(ask(input_tokens=200))
    waiting = rig.enter(ask(input_tokens=200))
    assert rig.gate.hold is Hold.MEMORY
    rig.now = 2.0
    rig.gate.expired(rig.now)
    assert waiting.refusal is not None and waiting.refusal.reason is Reason.MEMORY_PRESSURE


def test_a_memory_hold_ends_when_the_request_that_caused_it_leaves() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=20))
    for _ in range(4):
        rig.serve(10.0)
    rig.enter(ask(input_tokens=200))
    waiting = rig.enter(ask(input_tokens=200))
    assert rig.gate.hold is Hold.MEMORY
    rig.gate.release(waiting, SlotOutcome.IGNORED, rig.now, output_tokens=0)
    assert rig.gate.hold is None
    rig.tell(structs.replace(IDLE, total_blocks=200))
    assert rig.enter(ask(input_tokens=200)).state is TicketState.HANDED_ON


def test_a_gate_without_a_queue_takes_only_what_goes_on_at_once() -> None:
    limits = plain(max_queue=0)
    assert GateRig(limits).reason() is None
    assert GateRig(limits, load=structs.replace(IDLE, running=4)).reason() is Reason.QUEUE_FULL


def test_a_deadline_that_cannot_be_met_any_more_ends_the_wait_at_once() -> None:
    rig = GateRig()
    for _ in range(4):
        rig.enter()
    waiting = rig.enter(ask(deadline=0.5))
    rig.now = 0.5
    assert rig.gate.expired(rig.now) == [waiting]
    assert waiting.refusal is not None and waiting.refusal.reason is Reason.WAIT_EXCEEDED


def test_a_wait_that_is_expected_to_pass_the_budget_is_refused_at_once_with_its_estimate() -> None:
    rig = GateRig()
    for _ in range(4):
        rig.serve(3.0)
    for _ in range(6):
        rig.enter()
    offered = rig.offer()
    assert isinstance(offered, Refusal) and offered.reason is Reason.WAIT_EXCEEDED
    assert offered.estimated_wait_s == pytest.approx(3 * 3.0 / 4)
    assert offered.estimated_wait_s <= offered.retry_after_s <= offered.estimated_wait_s * 1.25
    assert not offered.queued and offered.first_token_s is None


def test_a_first_token_that_would_come_after_the_deadline_is_not_begun() -> None:
    rig = GateRig()
    for tokens in (100, 1000, 100, 1000):
        ticket = rig.enter(ask(input_tokens=tokens))
        rig.now += 0.1 + tokens * 0.001
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    assert first_token_s(rig.gate.rates, 500) == pytest.approx(0.6, rel=0.05)
    refused = rig.offer(ask(input_tokens=500, deadline=rig.now + 0.5))
    assert isinstance(refused, Refusal) and refused.reason is Reason.WAIT_EXCEEDED
    assert (refused.estimated_wait_s, refused.first_token_s) == (0.0, pytest.approx(0.6, rel=0.05))
    assert rig.reason(ask(input_tokens=500, deadline=rig.now + 0.7)) is None


def taught(*, s_per_token: float = 0.001, step_s: float = 0.1, **limits: object) -> GateRig:
    """Return a rig whose gate has learned that the backend prefills at this speed."""
    rig = GateRig(replace(plain(), **limits))  # type: ignore[arg-type]
    for tokens in (100, 1000) * 4:
        ticket = rig.enter(ask(input_tokens=tokens))
        rig.now += step_s + tokens * s_per_token
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    return rig


def test_the_first_token_is_due_at_the_tighter_of_deadline_and_wish() -> None:
    within = plain(first_token_within_s=2.0)
    waits = GateRig().gate.work.estimator.longest_wait
    due = [waits(ask(deadline=at, arrived_at=1.0), within, 1)[1] for at in (2.5, 4.0, None)]
    assert due == [2.5, 3.0, 3.0]
    assert (waits(ask(deadline=3.0), PLAIN, 1)[1], waits(ask(), PLAIN, 1)[1]) == (3.0, None)


def test_the_check_of_a_request_counts_for_its_deadline_and_not_for_the_limits() -> None:
    waits = GateRig().gate.work.estimator.longest_wait
    within = plain(first_token_within_s=2.0)
    due = [waits(ask(deadline=at, arrived_at=1.0, checked_s=8.0), within, 1)[1] for at in (2.5, 12.0, None)]
    assert due == [2.5, 11.0, 11.0]


def test_a_route_may_have_requests_refused_whose_first_token_would_be_late() -> None:
    rig = taught()

    def wanted(within_s: float) -> Demand:
        limits = replace(rig.limits, first_token_within_s=within_s)
        return ask(input_tokens=500, arrived_at=rig.now, limits=limits)

    assert rig.reason(wanted(0.5)) is Reason.WAIT_EXCEEDED
    assert rig.reason(wanted(0.7)) is None


def test_a_request_whose_turn_comes_too_late_for_its_first_token_is_not_begun() -> None:
    rig = taught(max_prefill_tokens=500)
    first = rig.enter(ask(input_tokens=900))
    second = rig.enter(ask(input_tokens=900, deadline=rig.now + 2.2))
    third = rig.enter(ask(input_tokens=900, deadline=rig.now + 9.9))
    assert (second.state, third.state) == (TicketState.WAITING, TicketState.WAITING)
    rig.now += 1.4  # the engine took longer than usual
    rig.gate.first_token(first, rig.now, 0)
    assert rig.gate.pump(rig.now) == [third]
    assert rig.gate.displaced() == [second]
    assert second.refusal is not None and second.refusal.reason is Reason.WAIT_EXCEEDED


def test_the_time_a_prefill_has_been_under_way_counts_in_the_next_ones_estimate() -> None:
    rig = taught()
    rig.enter(ask(input_tokens=1000))
    wanted = ask(input_tokens=500, deadline=rig.now + 1.8)
    rig.now += 0.6
    assert rig.reason(structs.replace(wanted, deadline=rig.now + 0.9)) is Reason.WAIT_EXCEEDED
    assert rig.reason(structs.replace(wanted, deadline=rig.now + 1.2)) is None


def test_a_prefill_that_is_all_but_done_lets_the_next_one_follow_without_a_gap() -> None:
    rig = taught(max_prefill_tokens=200)
    rig.enter(ask(input_tokens=1000))
    second = rig.enter(ask(input_tokens=1000))
    assert (second.state, rig.gate.hold) == (TicketState.WAITING, Hold.PREFILL)
    rig.now += 0.9
    assert rig.gate.pump(rig.now) == [second]


def test_an_unsteady_backend_must_be_expected_to_be_in_time_by_its_usual_error() -> None:
    rig = taught()
    for late in (0.5, -0.05) * 10:
        ticket = rig.enter(ask(input_tokens=500))
        rig.now += 0.6 + late
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    error_s = rig.gate.rates.error_s.value
    assert error_s == pytest.approx(0.27, abs=0.1)
    rig.gate.first_token(rig.enter(ask(input_tokens=1)), rig.now, 0)  # the engine is not idle
    expected_s = first_token_s(rig.gate.rates, 500)
    assert rig.reason(ask(input_tokens=500, deadline=rig.now + expected_s + 0.1)) is Reason.WAIT_EXCEEDED
    assert rig.reason(ask(input_tokens=500, deadline=rig.now + expected_s + error_s + 0.05)) is None


def test_estimates_of_a_bad_minute_do_not_keep_deadlines_out_for_good() -> None:
    rig = GateRig()
    for _ in range(4):
        ticket = rig.enter()
        rig.now += 3.0
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    assert rig.reason(ask(deadline=rig.now + 1.0)) is Reason.WAIT_EXCEEDED
    rig.now += 6.0
    assert rig.reason(ask(deadline=rig.now)) is Reason.WAIT_EXCEEDED
    tried = rig.enter(ask(deadline=rig.now + 1.0))
    assert tried.state is TicketState.HANDED_ON
    assert rig.reason(ask(deadline=rig.now + 1.0)) is Reason.WAIT_EXCEEDED, "one at a time"
    for _ in range(40):
        rig.now += 0.1
        rig.gate.first_token(tried, rig.now, 0)
        rig.end(tried)
        tried = rig.enter(ask(deadline=rig.now + 10.0))
    assert rig.reason(ask(deadline=rig.now + 1.0)) is None


def test_a_slow_start_does_not_keep_requests_from_an_idle_engine() -> None:
    rig = GateRig()
    for took_s in (3.0, 3.0, 3.0, 0.1):  # slow at first: the engine compiles at first use
        ticket = rig.enter()
        rig.now += took_s
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    assert first_token_s(rig.gate.rates, 100) > 1.0
    assert rig.reason(ask(deadline=rig.now + 0.5)) is None
    rig.gate.first_token(rig.enter(), rig.now, 0)
    assert rig.reason(ask(deadline=rig.now + 0.5)) is Reason.WAIT_EXCEEDED, "beside another it may be slow"


def after_an_outage() -> GateRig:
    """Return a gate whose engine stood still for 20 s after the first of nine requests had its first token."""
    rig = GateRig(plain(max_wait_s=None), load=structs.replace(IDLE, max_running=64))
    for _ in range(12):
        answer(rig)
    stopped = [rig.enter(ask(input_tokens=1, arrived_at=rig.now)) for _ in range(9)]
    for ticket in stopped:
        rig.gate.first_token(ticket, rig.now + (0.1 if ticket is stopped[0] else 20.0), 0)
    rig.now += 21.0
    for ticket in stopped:
        rig.end(ticket)
    assert first_token_s(rig.gate.rates, 100) > 5.0
    return rig


def answer(rig: GateRig) -> None:
    """Let the engine give a first token after 0.1 s, to one request alone."""
    ticket = rig.enter(ask(arrived_at=rig.now))
    rig.now += 0.1
    rig.gate.first_token(ticket, rig.now, 0)
    rig.end(ticket)


def test_a_burst_on_an_engine_that_is_idle_after_an_outage_is_taken() -> None:
    rig = after_an_outage()
    burst = [rig.enter(ask(arrived_at=rig.now)) for _ in range(8)]
    assert [ticket.state for ticket in burst] == [TicketState.HANDED_ON] * 8


def test_an_outage_is_forgotten_after_eight_first_tokens() -> None:
    rig = after_an_outage()
    for _ in range(8):
        answer(rig)
    assert first_token_s(rig.gate.rates, 100) == pytest.approx(0.1)


def cold_burst(*, trickle: bool) -> int:
    """Return how many of 48 simultaneous prompts an idle engine of unknown speed, 0.5 s a prompt, serves."""
    rig = GateRig(plain(max_wait_s=None, max_prefill_tokens=100), load=structs.replace(IDLE, max_running=64))
    running = [one for one in [rig.enter() for _ in range(48)] if one.state is TicketState.HANDED_ON]
    served = 0
    while running:
        ticket = running.pop(0)
        rig.now += 0.5
        rig.gate.first_token(ticket, rig.now, 0)
        served += 1
        if trickle:
            rig.offer()
        running += rig.gate.pump(rig.now) + rig.end(ticket)
    return served


def test_a_burst_on_an_idle_engine_of_unknown_speed_is_served() -> None:
    assert cold_burst(trickle=False) == 48


def test_a_burst_that_others_would_wait_for_is_served_as_far_as_first_tokens_are_in_time() -> None:
    assert LEARNED_FROM < cold_burst(trickle=True) < 24


def test_the_margin_before_a_deadline_is_never_more_than_the_estimate() -> None:
    rig = taught()
    for late in (9.0, 0.0, 0.0):
        ticket = rig.enter(ask(input_tokens=100))
        rig.now += 0.2 + late
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    rig.gate.first_token(rig.enter(ask(input_tokens=1)), rig.now, 0)
    expected_s = first_token_s(rig.gate.rates, 500)
    assert rig.gate.rates.error_s.value > 0.5
    assert rig.reason(ask(input_tokens=500, deadline=rig.now + 1.9 * expected_s)) is Reason.WAIT_EXCEEDED
    assert rig.reason(ask(input_tokens=500, deadline=rig.now + 2.1 * expected_s)) is None


def test_a_ticket_handed_on_beyond_the_forecast_has_the_reason() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=10))
    assert rig.enter(ask(input_tokens=150, max_output_tokens=50)).beyond == IDLE_ENGINE
    assert GateRig().enter().beyond is None


def test_a_long_prefill_under_way_holds_back_the_next_until_its_first_token() -> None:
    rig = GateRig(plain(max_prefill_tokens=500))
    first, second = rig.enter(ask(input_tokens=900)), rig.enter(ask(input_tokens=900))
    assert (second.state, rig.gate.hold) == (TicketState.WAITING, Hold.PREFILL)
    rig.gate.first_token(first, rig.now, 0)
    assert rig.gate.pump(rig.now) == [second]


@pytest.mark.parametrize(("tokens_a_second", "held"), [(1_000_000, False), (20_000, True)])
def test_a_fast_engine_is_given_the_prompts_of_20_ms_whatever_their_number(
    tokens_a_second: int, held: bool
) -> None:
    rig = GateRig(plain(max_prefill_tokens=500))
    for number in range(25):
        tokens = 100 + 90 * (number % 7)
        ticket = rig.enter(ask(input_tokens=tokens))
        rig.now += tokens / tokens_a_second
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket)
    rig.enter(ask(input_tokens=900))
    assert (rig.enter(ask(input_tokens=900)).state is TicketState.WAITING) is held


def test_prefill_holds_nobody_back_where_it_is_known_to_cost_nothing() -> None:
    rig = GateRig(plain(max_prefill_tokens=1000))
    for number in range(25):
        rig.serve(0.02 + 0.01 * (number % 3), ask(input_tokens=100 + 90 * (number % 7)))
    tickets = [rig.enter(ask(input_tokens=900)) for _ in range(4)]
    assert {ticket.state for ticket in tickets} == {TicketState.HANDED_ON}


def test_memory_is_reserved_for_what_answers_will_become_not_for_what_they_are() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=40, max_running=16))  # 640 tokens
    for _ in range(5):
        rig.enter(ask(input_tokens=50, max_output_tokens=100))
    assert rig.gate.in_flight == 3  # each peaks at 150 tokens and half a block; a fourth would exceed 95 %


def test_answers_that_are_really_short_let_more_run_side_by_side() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=40, max_running=16))
    for _ in range(30):
        rig.serve(0.1, ask(input_tokens=50, max_output_tokens=100), tokens=20)
    for _ in range(9):
        rig.enter(ask(input_tokens=50, max_output_tokens=100))
    assert rig.gate.in_flight == 7


def test_low_priority_stops_at_a_lower_watermark_than_high() -> None:
    def admitted(priority: int) -> int:
        rig = GateRig(load=structs.replace(IDLE, total_blocks=100, max_running=64))
        for _ in range(40):
            rig.enter(ask(priority=priority, input_tokens=20, max_output_tokens=20))
        return rig.gate.in_flight

    assert admitted(-1) < admitted(0) < admitted(1)


def test_the_prompt_that_the_engine_found_in_its_cache_needs_no_blocks_of_its_own() -> None:
    rig = GateRig(load=structs.replace(IDLE, total_blocks=40, max_running=16))
    first = rig.enter(ask(input_tokens=400, max_output_tokens=50))
    second = rig.enter(ask(input_tokens=400, max_output_tokens=50))
    assert second.state is TicketState.WAITING
    rig.gate.first_token(first, rig.now, 320)
    assert rig.gate.pump(rig.now) == [second]


def test_the_ladder_shortens_answers_before_it_sheds_and_steps_back_late() -> None:
    limits = plain(
        max_queue=100,
        rungs=(Rung(2, max_tokens=30), Rung(4, max_tokens=10, shed_low=True), Rung(6, shed_all=True)),
    )
    rig = GateRig(limits)
    tickets = [rig.enter() for _ in range(9)]
    assert [ticket.max_tokens for ticket in tickets] == [50] * 6 + [30] * 2 + [10]
    assert rig.reason(ask(priority=-1)) is Reason.LOW_PRIORITY_SHED
    tickets.append(rig.enter())
    assert rig.reason(ask(priority=1)) is Reason.QUEUE_FULL
    rig.gate.release(tickets[-1], SlotOutcome.IGNORED, rig.now, output_tokens=0)
    assert rig.reason() is Reason.QUEUE_FULL  # 5 are waiting: above 0.8 × 6
    rig.gate.release(tickets[-2], SlotOutcome.IGNORED, rig.now, output_tokens=0)
    assert rig.reason() is None


def test_a_backend_that_fails_is_asked_less_and_then_not_at_all() -> None:
    rig = GateRig(replace(plain(), max_wait_s=60.0))
    for number in range(10):
        ticket = rig.enter()
        rig.end(ticket, SlotOutcome.DROPPED if number % 3 == 0 else SlotOutcome.SUCCEEDED)
    reasons = [rig.reason() for _ in range(20)]
    assert reasons.count(None) == 2 and reasons.count(Reason.CIRCUIT_OPEN) == 18
    while rig.reason() is not None:
        rig.now += 0.001
    for _ in range(100):
        offered = rig.offer()
        if isinstance(offered, AdmissionTicket):
            rig.gate.pump(rig.now)
            rig.end(offered, SlotOutcome.DROPPED)
    refused = rig.offer()
    assert isinstance(refused, Refusal) and refused.reason is Reason.CIRCUIT_OPEN
    assert refused.retry_after_s >= 20.0
    rig.now += 100.0
    assert rig.reason() is None


def test_a_silent_backend_gets_fewer_requests_but_never_none() -> None:
    rig = GateRig(replace(plain(), stale_in_flight=2), load=structs.replace(IDLE, max_running=8))
    first = [rig.enter() for _ in range(4)]
    rig.now = 6.0
    assert rig.enter().state is TicketState.WAITING
    for ticket in first[:3]:
        rig.end(ticket)
    assert rig.gate.in_flight == 2
    rig.tell(structs.replace(IDLE, max_running=8))
    assert rig.enter().state is TicketState.HANDED_ON


def test_answers_that_are_too_slow_shrink_the_batch_and_good_ones_let_it_grow() -> None:
    rig = GateRig(
        replace(plain(), tpot_slo_s=0.05, max_wait_s=60.0), load=structs.replace(IDLE, max_running=8)
    )
    tickets = [rig.enter() for _ in range(8)]
    for ticket in tickets:
        rig.gate.first_token(ticket, rig.now, 0)
    rig.now = 10.0
    rig.end(tickets[0], tokens=11)
    assert rig.gate.limit.value == 7
    for ticket in tickets[1:]:
        rig.end(ticket, SlotOutcome.IGNORED)
    for _ in range(10):
        running = [rig.enter() for _ in range(7)]
        for ticket in running:
            rig.gate.first_token(ticket, rig.now, 0)
        rig.now += 0.1
        for ticket in running:
            rig.end(ticket, tokens=11)
    assert rig.gate.limit.value == 8


def test_a_ticket_is_released_once_whatever_is_said_about_it() -> None:
    rig = GateRig()
    ticket = rig.enter()
    rig.end(ticket)
    rig.end(ticket, SlotOutcome.DROPPED)
    assert (rig.gate.in_flight, len(rig.gate.forecast)) == (0, 0)
    assert rig.gate.circuit.error_rate(rig.now) == 0.0


def test_a_request_that_leaves_the_queue_by_itself_is_gone_at_once() -> None:
    rig = GateRig()
    for _ in range(4):
        rig.enter()
    waiting = rig.enter()
    rig.gate.release(waiting, SlotOutcome.IGNORED, rig.now, output_tokens=0)
    assert rig.gate.queued == 0 and waiting.state is TicketState.GONE


def test_while_no_answer_has_ended_trying_again_makes_sense_after_what_one_has_taken_so_far() -> None:
    rig = GateRig(plain(max_queue=1, max_wait_s=60.0))
    for _ in range(5):
        rig.enter()
    rig.now = 8.0
    refused = rig.offer()
    assert isinstance(refused, Refusal) and refused.reason is Reason.QUEUE_FULL
    assert refused.retry_after_s >= 8.0 / 4


def test_a_refused_waiter_gets_an_estimate_of_how_long_it_would_wait_now() -> None:
    rig = GateRig(plain(max_wait_s=1000.0))
    for _ in range(3):
        rig.serve(4.0)
    for _ in range(4):
        rig.enter()
    hasty = rig.enter(ask(limits=plain(max_wait_s=2.0)))
    for _ in range(60):
        rig.enter()
    rig.now += 2.0
    assert rig.gate.expired(rig.now) == [hasty] and hasty.refusal is not None
    assert hasty.estimated_wait_s == pytest.approx(1.0), "a place comes back each second"
    assert hasty.refusal.estimated_wait_s == pytest.approx(61.0), "behind the sixty who came later"


def test_requests_without_max_tokens_are_not_planned_for_with_the_whole_context() -> None:
    def handed_on(open_ended: bool) -> int:
        rig = GateRig(load=structs.replace(IDLE, total_blocks=1_000, max_running=50))  # 16,000 tokens
        for _ in range(10):
            rig.enter(ask(input_tokens=100, max_output_tokens=15_900, open_ended=open_ended))
        return rig.gate.in_flight

    assert (handed_on(False), handed_on(True)) == (1, 10)


def test_by_default_the_first_requests_of_a_slow_engine_are_served() -> None:
    rig = GateRig(AdmissionLimits(), load=structs.replace(IDLE, max_running=2))
    first, *others = [rig.enter() for _ in range(4)]
    rig.now = 20.0
    assert rig.gate.expired(rig.now) == [], "nothing is known of the engine yet"
    rig.gate.first_token(first, rig.now, 0)
    rig.now = 21.0
    assert rig.end(first) == [others[1]], "in time for an engine whose first token takes 20 s"


def test_by_default_a_request_is_refused_that_would_have_its_first_token_too_late() -> None:
    rig = GateRig(AdmissionLimits(), load=structs.replace(IDLE, max_running=1))
    for _ in range(10):
        rig.serve(4.0, ask(arrived_at=rig.now))
    now = ask(arrived_at=rig.now)
    rig.enter(now), rig.enter(now)
    assert rig.reason(now) is Reason.WAIT_EXCEEDED, "two answers of 4 s are before it"


def test_a_target_that_one_answer_alone_misses_is_replaced_by_twice_its_pace() -> None:
    def target_after(s_per_token: float) -> float | None:
        rig = GateRig(AdmissionLimits())
        tokens = [0]
        ticket = rig.enter(ask(produced=lambda: tokens[0], max_output_tokens=200))
        rig.gate.first_token(ticket, rig.now, 0)
        for tokens[0] in range(1, 101):
            rig.now += s_per_token
            rig.gate.report(IDLE, rig.now)
        return rig.gate.work.estimator.tpot_target_s(AdmissionLimits())

    assert target_after(0.1) == 0.25
    assert target_after(0.5) == pytest.approx(1.0, rel=0.05)


def test_every_rung_of_the_default_ladder_can_be_reached() -> None:
    limits = AdmissionLimits()
    assert limits.max_queue >= max(rung.depth for rung in limits.rungs)


def test_low_priority_leaves_places_for_others_while_they_arrive() -> None:
    rig = GateRig(load=structs.replace(IDLE, max_running=16))
    rig.enter()
    lows = [rig.enter(ask(priority=-1)) for _ in range(20)]
    handed_on = [ticket for ticket in lows if ticket.state is TicketState.HANDED_ON]
    assert len(handed_on) == 13, "two of the sixteen places stay free, beside the first one's"
    assert rig.enter().state is TicketState.HANDED_ON
    assert rig.enter().state is TicketState.HANDED_ON

    rig.now += 11  # no other request has arrived for a while
    rig.gate.pump(rig.now)
    rig.gate.release(handed_on[0], SlotOutcome.SUCCEEDED, rig.now, output_tokens=5)
    assert len(rig.gate.pump(rig.now)) == 1


def test_a_low_priority_prompt_waits_for_the_one_before_it_while_others_arrive() -> None:
    rig = GateRig(limits=plain(max_prefill_tokens=1_000), load=structs.replace(IDLE, max_running=16))
    rig.enter(ask(input_tokens=600))
    low = rig.enter(ask(input_tokens=600, priority=-1))
    assert rig.gate.hold is Hold.PREFILL
    assert rig.enter(ask(input_tokens=600)).state is TicketState.HANDED_ON, "others need room for a part"
    assert low.state is TicketState.WAITING
