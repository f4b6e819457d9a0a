"""What differs between backends and routes: several workers, several texts, limits of a route's own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from admission.events import Outcome
from admission.gate import Hold, Refusal, Ticket, TicketState
from admission.ladder import MAX_LADDERS, Ladders, Rung
from admission.rates import Rates
from admission.values import Limits, Reason
from tests.admission.gates import IDLE, Door, ask


def test_a_request_of_several_texts_takes_as_many_places() -> None:
    door = Door()
    wide = door.enter(ask(sequences=3, max_output_tokens=150))
    assert (door.gate.in_flight, door.gate.sequences) == (1, 3)
    assert door.enter().state is TicketState.HANDED_ON
    waiting = door.enter()
    assert (waiting.state, door.gate.hold) == (TicketState.WAITING, Hold.SLOTS)
    assert door.end(wide) == [waiting]


def test_several_texts_share_a_prompt_and_grow_side_by_side() -> None:
    def peak(sequences: int) -> float:
        door = Door(load=replace(IDLE, max_running=16))
        door.enter(ask(input_tokens=160, max_output_tokens=100 * sequences, sequences=sequences))
        return door.gate.usage(door.now)[1] * 16_000

    assert peak(1) == 160 + 100 + 8
    assert peak(4) == 160 + 4 * (100 + 8)


def test_how_long_an_answer_is_is_learned_of_each_text() -> None:
    door = Door(load=replace(IDLE, max_running=16))
    for _ in range(30):
        door.serve(0.1, ask(max_output_tokens=400, sequences=4), tokens=80)
    assert door.enter(ask(max_output_tokens=100)).expected == pytest.approx(20, rel=0.2)


def test_a_pool_of_workers_takes_as_many_prefills_as_it_has_workers() -> None:
    def under_way(workers: int) -> int:
        load = replace(IDLE, max_running=16 * workers, workers=workers)
        door = Door(Limits(max_prefill_tokens=1000), load=load)
        for _ in range(12):
            door.enter(ask(input_tokens=600, max_output_tokens=10))
        return door.gate.in_flight

    assert (under_way(1), under_way(3)) == (2, 5)


def test_times_that_do_not_depend_on_the_prompt_teach_no_prefill_rate() -> None:
    draw, rates = random.Random(5), Rates()
    for _ in range(500):
        rates.first_token(100 + draw.randrange(4), draw.uniform(0.01, 0.3))
        assert rates.s_per_token == 0.0
    assert 0.1 < rates.first_token_s(8_000) < 0.2


def test_a_prefill_rate_is_learned_through_noise_and_never_makes_the_step_negative() -> None:
    draw, rates = random.Random(6), Rates()
    for _ in range(300):
        tokens = draw.randrange(50, 4_000)
        rates.first_token(tokens, 0.02 + tokens * 0.0005 + draw.gauss(0, 0.1))
    assert rates.s_per_token == pytest.approx(0.0005, rel=0.3)
    assert rates.step_s >= 0.0


def test_others_sequences_are_not_forgotten_when_ours_come_and_go_between_two_words() -> None:
    door = Door(load=replace(IDLE, running=1, kv_usage=0.5, total_blocks=10))
    for _ in range(3):
        door.end(door.enter(ask(input_tokens=10, max_output_tokens=10)))
    assert door.enter().state is TicketState.WAITING, "an engine that was idle would take it"
    assert door.gate.hold is Hold.MEMORY


def test_a_route_has_a_ladder_and_a_queue_of_its_own() -> None:
    strict = Limits(max_queue=2, rungs=(Rung(1, max_tokens=10),))
    door = Door()
    for _ in range(5):
        door.enter()
    assert door.gate.queued == 1
    assert door.enter().max_tokens == 50
    assert door.reason(ask(limits=strict)) is Reason.QUEUE_FULL
    door.end(next(iter(door.gate.running)))
    assert door.enter(ask(limits=strict)).max_tokens == 10


def test_changed_limits_hold_for_the_next_request() -> None:
    door = Door()
    for _ in range(4):
        door.enter()
    assert door.reason(ask(limits=Limits(max_input_tokens=99))) is Reason.TOKEN_BUDGET_EXCEEDED
    assert door.reason(ask(limits=Limits(max_input_tokens=100))) is None


def test_ladders_of_routes_that_are_gone_are_forgotten() -> None:
    ladders = Ladders(())
    kept = ladders.of((Rung(1),))
    assert ladders.of((Rung(1),)) is kept
    for depth in range(2, MAX_LADDERS + 3):
        ladders.of((Rung(depth),))
    assert ladders.of((Rung(1),)) is not kept
    assert ladders.of(()) is ladders.own


def test_those_who_wait_when_the_circuit_opens_leave_at_once() -> None:
    door = Door(replace(Limits(), max_wait_s=60.0))
    tickets = [door.enter() for _ in range(20)]
    for _ in range(8):  # each one that fails makes room for another
        door.end(next(iter(door.gate.running)), Outcome.DROPPED)
    assert door.gate.queued == 8
    for _ in range(2):
        door.end(next(iter(door.gate.running)), Outcome.DROPPED)
    gone = door.gate.pushed_out()
    assert door.gate.queued == 0 and gone and gone == [t for t in tickets if t.refusal is not None]
    assert {ticket.refusal.reason for ticket in gone if ticket.refusal} == {Reason.CIRCUIT_OPEN}


def test_a_first_token_that_is_late_shrinks_the_batch_only_where_the_prompt_is_not_why() -> None:
    limits = Limits(tpot_slo_s=1.0, ttft_slo_s=0.2, max_wait_s=60.0)

    def after(prompt: int) -> int:
        door = Door(limits, load=replace(IDLE, max_running=8))
        for tokens in (400, 1600, 800, 400, 1600, 800):  # a millisecond a token
            ticket = door.enter(ask(input_tokens=tokens))
            door.now += tokens / 1000
            door.gate.first_token(ticket, door.now, 0)
            door.end(ticket, Outcome.IGNORED)
        ticket = door.enter(ask(input_tokens=prompt))
        door.now += 1.0
        door.gate.first_token(ticket, door.now, 0)
        door.end(ticket, tokens=11)
        return door.gate.limit.value

    assert after(prompt=100) < 8
    assert after(prompt=1000) == 8


def test_a_batch_larger_than_the_default_bound_is_filled() -> None:
    door = Door(Limits(max_in_flight=2), load=replace(IDLE, max_running=4))
    tickets = [door.enter() for _ in range(4)]
    assert all(isinstance(t, Ticket) and t.state is TicketState.HANDED_ON for t in tickets)


def test_a_refusal_that_never_waited_says_so() -> None:
    offered = Door().offer(ask(input_tokens=5_000))
    assert isinstance(offered, Refusal) and not offered.queued
