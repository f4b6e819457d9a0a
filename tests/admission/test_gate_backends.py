"""What differs between backends and routes: several workers, several texts, a route's own limits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from msgspec import structs

from admission.events import SlotOutcome
from admission.gate import MAX_LADDERS
from admission.in_flight_work import RESERVE_FOR_S
from admission.ladder import LEVEL, Rung
from admission.rates import Rates
from admission.ticket import AdmissionTicket, Hold, Refusal, TicketState
from admission.values import Demand, Reason
from tests.admission.gate_rig import IDLE, GateRig, ask, first_token_s, plain


def test_a_request_of_several_texts_takes_as_many_places() -> None:
    rig = GateRig()
    wide = rig.enter(ask(sequences=3, max_output_tokens=150))
    assert (rig.gate.in_flight, rig.gate.work.sequences) == (1, 3)
    assert rig.enter().state is TicketState.HANDED_ON
    waiting = rig.enter()
    assert (waiting.state, rig.gate.hold) == (TicketState.WAITING, Hold.SLOTS)
    assert rig.end(wide) == [waiting]


def test_several_texts_share_a_prompt_and_grow_side_by_side() -> None:
    def peak(sequences: int) -> float:
        rig = GateRig(load=structs.replace(IDLE, max_running=16))
        rig.enter(ask(input_tokens=160, max_output_tokens=100 * sequences, sequences=sequences))
        return rig.gate.work.memory.usage(rig.now)[1] * 16_000

    assert peak(1) == 160 + 100 + 8
    assert peak(4) == 160 + 4 * (100 + 8)


def test_how_long_an_answer_is_is_learned_of_each_text() -> None:
    rig = GateRig(load=structs.replace(IDLE, max_running=16))
    for _ in range(30):
        rig.serve(0.1, ask(max_output_tokens=400, sequences=4), tokens=80)
    assert rig.enter(ask(max_output_tokens=100)).reserved.expected == pytest.approx(20, rel=0.2)


def test_a_pool_of_workers_takes_as_many_prefills_as_it_has_workers() -> None:
    def under_way(workers: int) -> int:
        load = structs.replace(IDLE, max_running=16 * workers, workers=workers)
        rig = GateRig(plain(max_prefill_tokens=1000), load=load)
        for _ in range(12):
            rig.enter(ask(input_tokens=600, max_output_tokens=10))
        return rig.gate.in_flight

    assert (under_way(1), under_way(3)) == (2, 5)


def test_vectors_wait_for_prompts_only_where_text_is_generated_too() -> None:
    def under_way(*before: Demand, after_s: float = 0.0) -> int:
        rig = GateRig(plain(max_prefill_tokens=1000), load=structs.replace(IDLE, max_running=16))
        for one in before:
            rig.end(rig.enter(one))
        rig.now += after_s
        for _ in range(8):
            rig.enter(ask(input_tokens=600, max_output_tokens=1, generates=False))
        return rig.gate.in_flight

    chat = ask(input_tokens=10, max_output_tokens=10)
    assert under_way() == 8
    assert under_way(chat) == under_way(chat, after_s=RESERVE_FOR_S) == 2
    assert under_way(chat, after_s=RESERVE_FOR_S + 1) == 8


def test_vectors_that_wait_inside_an_engine_fill_its_next_batch_where_nothing_else_waits_there() -> None:
    def under_way(*before: Demand) -> int:
        rig = GateRig(load=structs.replace(IDLE, max_running=32))
        for one in before:
            rig.end(rig.enter(one))
        first = rig.enter(ask(input_tokens=60, generates=False))
        assert first.state is TicketState.HANDED_ON
        rig.gate.report(structs.replace(IDLE, max_running=32, running=1, waiting=12), rig.now)
        for _ in range(8):
            rig.enter(ask(input_tokens=60, generates=False))
        return rig.gate.in_flight

    assert (under_way(), under_way(ask())) == (9, 1)


def test_a_chat_behind_vectors_waits_for_prompts_as_behind_others() -> None:
    rig = GateRig(plain(max_prefill_tokens=1000), load=structs.replace(IDLE, max_running=16))
    vectors = [rig.enter(ask(input_tokens=600, generates=False)) for _ in range(4)]
    chat = rig.enter(ask(input_tokens=10))
    more = rig.enter(ask(input_tokens=600, generates=False, priority=-1))
    assert (chat.state, more.state) == (TicketState.WAITING, TicketState.WAITING)
    for ticket in vectors[:2]:
        rig.end(ticket)
    assert chat.state is TicketState.WAITING
    assert rig.end(vectors[2])[0] is chat


def test_times_that_do_not_depend_on_the_prompt_teach_no_prefill_rate() -> None:
    draw, rates = random.Random(5), Rates()
    for _ in range(500):
        rates.first_token(100 + draw.randrange(4), draw.uniform(0.01, 0.3))
        assert rates.s_per_token == 0.0
    assert 0.1 < first_token_s(rates, 8_000) < 0.2


def test_a_prefill_rate_is_learned_through_noise_and_never_makes_the_step_negative() -> None:
    draw, rates = random.Random(6), Rates()
    for _ in range(300):
        tokens = draw.randrange(50, 4_000)
        rates.first_token(tokens, 0.02 + tokens * 0.0005 + draw.gauss(0, 0.1))
    assert rates.s_per_token == pytest.approx(0.0005, rel=0.3)
    assert rates.step_s >= 0.0


def test_sequences_of_other_clients_stay_counted_while_ours_come_and_go_between_two_reports() -> None:
    rig = GateRig(load=structs.replace(IDLE, running=1, kv_usage=0.5, total_blocks=10))
    for _ in range(3):
        rig.end(rig.enter(ask(input_tokens=10, max_output_tokens=10)))
    assert rig.enter().state is TicketState.WAITING, "an engine that was idle would take it"
    assert rig.gate.hold is Hold.MEMORY


def test_a_route_has_a_ladder_and_a_queue_of_its_own() -> None:
    strict = plain(max_queue=2, rungs=(Rung(1, max_tokens=10),))
    rig = GateRig()
    for _ in range(5):
        rig.enter()
    assert rig.gate.queued == 1
    assert rig.enter().max_tokens == 50
    assert rig.reason(ask(limits=strict)) is Reason.QUEUE_FULL
    rig.end(next(iter(rig.gate.work.tickets.values())))
    assert rig.enter(ask(limits=strict)).max_tokens == 10


def test_changed_limits_hold_for_the_next_request() -> None:
    rig = GateRig()
    for _ in range(4):
        rig.enter()
    assert rig.reason(ask(limits=plain(max_input_tokens=99))) is Reason.TOKEN_BUDGET_EXCEEDED
    assert rig.reason(ask(limits=plain(max_input_tokens=100))) is None


def test_ladders_of_routes_that_are_gone_are_forgotten() -> None:
    rungs = (Rung(10, max_tokens=10),)
    rig = GateRig(load=structs.replace(IDLE, max_running=1))
    demand = ask(limits=plain(rungs=rungs, max_wait_s=60.0))
    tickets = [rig.enter(demand) for _ in range(12)]
    rig.end(tickets[-1])
    rig.end(tickets[-2])
    assert rig.gate.queued == 9
    assert rig.gate.rung(rungs) == (1, rungs[0]), "a level that was entered is left only at a shorter queue"
    for depth in range(MAX_LADDERS):
        rig.gate.rung((Rung(100 + depth),))
    assert rig.gate.rung(rungs) == (0, LEVEL)


def test_a_route_with_the_rungs_of_its_backend_shares_the_level_of_the_backend() -> None:
    rig = GateRig(plain(rungs=(Rung(10),), max_wait_s=60.0), load=structs.replace(IDLE, max_running=1))
    tickets = [rig.enter() for _ in range(12)]
    rig.end(tickets[-1])
    rig.end(tickets[-2])
    assert rig.gate.rung((Rung(10),)) == rig.gate.rung() == (1, Rung(10))


def test_those_who_wait_when_the_circuit_opens_leave_at_once() -> None:
    rig = GateRig(replace(plain(), max_wait_s=60.0))
    tickets = [rig.enter() for _ in range(20)]
    for _ in range(8):  # each request that fails makes room for another
        rig.end(next(iter(rig.gate.work.tickets.values())), SlotOutcome.DROPPED)
    assert rig.gate.queued == 8
    for _ in range(2):
        rig.end(next(iter(rig.gate.work.tickets.values())), SlotOutcome.DROPPED)
    gone = rig.gate.displaced()
    assert rig.gate.queued == 0 and gone and gone == [t for t in tickets if t.refusal is not None]
    assert {ticket.refusal.reason for ticket in gone if ticket.refusal} == {Reason.CIRCUIT_OPEN}


def test_a_first_token_that_is_late_shrinks_the_batch_only_where_the_prompt_is_not_why() -> None:
    limits = plain(tpot_slo_s=1.0, ttft_slo_s=0.2, max_wait_s=60.0)

    def after(prompt: int) -> int:
        rig = GateRig(limits, load=structs.replace(IDLE, max_running=8))
        for tokens in (400, 1600, 800, 400, 1600, 800):  # prefill: one millisecond a token
            ticket = rig.enter(ask(input_tokens=tokens))
            rig.now += tokens / 1000
            rig.gate.first_token(ticket, rig.now, 0)
            rig.end(ticket, SlotOutcome.IGNORED)
        ticket = rig.enter(ask(input_tokens=prompt))
        rig.now += 1.0
        rig.gate.first_token(ticket, rig.now, 0)
        rig.end(ticket, tokens=11)
        return rig.gate.limit.value

    assert after(prompt=100) < 8
    assert after(prompt=1000) == 8


def test_a_batch_larger_than_the_default_bound_is_filled() -> None:
    rig = GateRig(plain(max_in_flight=2), load=structs.replace(IDLE, max_running=4))
    tickets = [rig.enter() for _ in range(4)]
    assert all(isinstance(t, AdmissionTicket) and t.state is TicketState.HANDED_ON for t in tickets)


def test_a_refusal_that_never_waited_says_so() -> None:
    offered = GateRig().offer(ask(limits=plain(max_input_tokens=99)))
    assert isinstance(offered, Refusal) and not offered.queued


@pytest.mark.parametrize(("tokens", "took_s"), [(1, 0.3), (11, 0.1)], ids=["one token", "more of them"])
def test_a_target_for_the_first_token_alone_moves_the_limit(tokens: int, took_s: float) -> None:
    def after(target_s: float) -> int:
        rig = GateRig(plain(ttft_slo_s=target_s), load=structs.replace(IDLE, max_running=8))
        ticket = rig.enter()
        rig.now += took_s
        rig.gate.first_token(ticket, rig.now, 0)
        rig.now += 9.0  # a slow pace, which must not matter
        rig.end(ticket, tokens=tokens)
        return rig.gate.limit.value

    assert (after(took_s / 2), after(took_s * 2)) == (1, 8)


def test_a_target_for_the_pace_alone_moves_the_limit_whenever_the_first_token_came() -> None:
    def after(pace_s: float) -> int:
        rig = GateRig(plain(tpot_slo_s=0.1), load=structs.replace(IDLE, max_running=8))
        ticket = rig.enter()
        rig.now += 50.0
        rig.gate.first_token(ticket, rig.now, 0)
        rig.now += 10 * pace_s
        rig.end(ticket, tokens=11)
        return rig.gate.limit.value

    assert (after(0.2), after(0.05)) == (1, 8)


def test_a_few_unexpected_cache_hits_do_not_make_prefill_free() -> None:
    """Twenty noisy first tokens once did, and all waiting requests were handed on at once."""
    rates, draw = Rates(), random.Random(2)
    for _ in range(200):
        tokens = draw.randint(100, 3000)
        rates.first_token(tokens, 0.2 + tokens * 0.0004)
    for _ in range(20):
        tokens = draw.randint(100, 3000)
        rates.first_token(tokens, 0.2 if tokens > 1500 else 0.2 + tokens * 0.0004)
    assert not rates.prefill_is_free
    assert rates.s_per_token > 0.0


def test_the_rate_is_learned_of_the_tokens_that_the_engine_really_computed() -> None:
    rig = GateRig()
    for number in range(40):
        tokens = 200 + 50 * (number % 7)
        cached = tokens // 2 if number % 3 == 0 else 0  # the demand does not foresee it
        ticket = rig.enter(ask(input_tokens=tokens, cached_tokens=0))
        rig.now += 0.1 + (tokens - cached) * 0.001
        rig.gate.first_token(ticket, rig.now, cached)
        rig.end(ticket)
    assert rig.gate.rates.s_per_token == pytest.approx(0.001)
    assert rig.gate.rates.step_s == pytest.approx(0.1)


def test_a_scaled_backend_takes_its_share_of_sequences_and_never_none() -> None:
    rig = GateRig(load=structs.replace(IDLE, max_running=8))
    rig.gate.work.scale = 0.5
    tickets = [rig.enter() for _ in range(6)]
    assert [ticket.state for ticket in tickets].count(TicketState.HANDED_ON) == 4
    assert rig.gate.hold is Hold.SLOTS
    rig.gate.work.scale = 1.0
    assert rig.gate.pump(rig.now) == tickets[4:]
    small = GateRig(load=structs.replace(IDLE, max_running=8))
    small.gate.work.scale = 0.01
    assert small.enter().state is TicketState.HANDED_ON


def test_a_scaled_backend_takes_its_share_of_blocks() -> None:
    def taken(factor: float) -> int:
        rig = GateRig(load=structs.replace(IDLE, total_blocks=100, max_running=50))  # 1,600 tokens
        rig.gate.work.scale = factor
        tickets = [rig.enter(ask(input_tokens=100, max_output_tokens=1)) for _ in range(30)]
        assert rig.gate.hold is Hold.MEMORY
        return [ticket.state for ticket in tickets].count(TicketState.HANDED_ON)

    assert (taken(1.0), taken(0.5)) == (13, 6)


def test_reading_the_rung_of_a_new_request_does_not_move_the_ladder() -> None:
    rungs = (Rung(1, max_tokens=10), Rung(3, shed_low=True))
    rig = GateRig(load=structs.replace(IDLE, max_running=1))
    assert rig.gate.rung(rungs) == (0, LEVEL)
    for _ in range(4):
        rig.enter()
    assert rig.gate.queued == 3
    assert rig.gate.rung(rungs) == (2, Rung(3, max_tokens=10, shed_low=True))
    assert rig.gate.rung() == (0, LEVEL)


def test_one_place_in_sixteen_is_kept_for_the_high_priority_while_it_comes() -> None:
    limits = plain(max_wait_s=60.0, max_prefill_tokens=100_000, aging_s=0.0)
    rig = GateRig(limits, load=structs.replace(IDLE, total_blocks=10_000, max_running=32))
    rig.end(rig.enter(ask(priority=1)))
    normal = [rig.enter() for _ in range(32)]
    assert [ticket.state for ticket in normal].count(TicketState.HANDED_ON) == 30
    urgent = [rig.enter(ask(priority=1)) for _ in range(2)]
    assert {ticket.state for ticket in urgent} == {TicketState.HANDED_ON}
    for ticket in urgent:
        rig.end(ticket)
    rig.now += 11.0
    rig.tell(structs.replace(IDLE, total_blocks=10_000, max_running=32, running=30))
    assert rig.gate.pump(rig.now) == normal[30:], "no such request has come for long: all are for everybody"


def test_no_prompt_waits_for_another_one_at_a_hosted_service() -> None:
    """Its first token takes two seconds whatever the others ask; as an engine it got one prompt at a time."""
    rig = GateRig(plain(max_wait_s=None, max_prefill_s=0.12), load=None, hosted=True)
    for _ in range(20):
        alone = rig.enter(ask(input_tokens=1_900, arrived_at=rig.now))
        rig.now += 2.0
        rig.gate.first_token(alone, rig.now, 0)
        rig.end(alone)
    burst = [rig.enter(ask(input_tokens=1_900, arrived_at=rig.now)) for _ in range(50)]
    assert all(ticket.state is TicketState.HANDED_ON for ticket in burst)
