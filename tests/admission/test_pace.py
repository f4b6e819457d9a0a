"""The pace of running answers, and how many concurrent sequences it allows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.limit import LEAST_SHARE, AdaptiveLimit
from admission.pace import ENOUGH_WINDOWS, LATE, STEPS, Pace
from admission.ticket import AdmissionTicket, TicketState
from admission.values import BackendLoad
from tests.admission.gate_rig import DEMAND, plain

TARGET_S = 0.05


@dataclass
class Answers:
    """``concurrent`` answers, each with one token a step."""

    concurrent: int
    pace: Pace = field(default_factory=Pace)
    now: float = 0.0
    tokens: int = 1

    def begin(self, *, target_s: float | None = TARGET_S) -> None:
        self.pace.set_running(self.concurrent, self.now)
        for number in range(self.concurrent):
            self.pace.begin(number, lambda: self.tokens, self.now, texts=1, target_s=target_s)

    def step(self, seconds: float) -> bool:
        self.now += seconds
        self.tokens += 1
        return self.pace.look(self.now)

    def windows(self, count: int, seconds: float) -> None:
        """Run ``count`` windows of steps that take ``seconds`` each."""
        closed = sum(self.step(seconds) for _ in range(count * STEPS))
        while closed < count:  # rounding may leave the sum of the steps a little short of a window
            closed += self.step(seconds)


def allowed(pace: Pace) -> float | None:
    found = pace.allows()
    return None if found is None else found[0]


def test_answers_that_produce_in_the_moment_they_begin_close_no_window() -> None:
    answers = Answers(10, now=100.0)
    answers.begin()
    assert answers.step(0.0) is False


def test_the_pace_allows_nothing_in_particular_before_enough_windows() -> None:
    answers = Answers(10)
    answers.begin()
    answers.windows(ENOUGH_WINDOWS - 1, LATE * TARGET_S * 0.99)
    assert allowed(answers.pace) is None
    answers.windows(1, LATE * TARGET_S * 0.99)
    assert allowed(answers.pace) is not None


def test_one_window_far_beyond_the_target_is_enough() -> None:
    answers = Answers(10)
    answers.begin()
    answers.windows(1, 2 * TARGET_S)
    assert allowed(answers.pace) == pytest.approx(5.0, rel=0.01)


def test_twice_the_time_that_the_target_gives_halves_those_side_by_side() -> None:
    answers = Answers(10)
    answers.begin()
    answers.windows(ENOUGH_WINDOWS, 2 * TARGET_S)
    assert allowed(answers.pace) == pytest.approx(5.0, rel=0.01)


def test_a_pace_that_varies_between_windows_allows_fewer_sequences() -> None:
    steady, uneven = Answers(10), Answers(10)
    for answers in (steady, uneven):
        answers.begin()
    for _ in range(10):
        steady.windows(2, 0.04)
        uneven.windows(1, 0.02)
        uneven.windows(1, 0.06)
    found = allowed(steady.pace), allowed(uneven.pace)
    assert found[0] == pytest.approx(12.5, rel=0.01)
    assert found[1] is not None and found[1] < 11


def test_a_machine_that_turns_slow_is_noticed_before_an_answer_has_ended() -> None:
    answers = Answers(10)
    answers.begin()
    answers.windows(20, 0.03)
    assert (allowed(answers.pace) or 0) > 10
    answers.windows(3, 0.06)
    assert (allowed(answers.pace) or 0) < 10


def test_answers_of_routes_without_a_target_say_nothing() -> None:
    answers = Answers(10)
    answers.begin(target_s=None)
    assert not any(answers.step(9.0) for _ in range(2 * ENOUGH_WINDOWS * STEPS))
    assert allowed(answers.pace) is None


def test_each_answer_is_measured_against_its_own_routes_target() -> None:
    answers = Answers(10)
    answers.begin(target_s=2 * TARGET_S)
    answers.windows(ENOUGH_WINDOWS, 2 * TARGET_S)
    assert allowed(answers.pace) == pytest.approx(10.0, rel=0.01)


def test_texts_of_one_request_grow_side_by_side() -> None:
    pace, tokens, now = Pace(), 1, 0.0
    pace.set_running(4, now)
    pace.begin(1, lambda: tokens, now, texts=4, target_s=TARGET_S)
    for _ in range(ENOUGH_WINDOWS * STEPS + 4):
        now, tokens = now + TARGET_S, tokens + 4
        pace.look(now)
    assert allowed(pace) == pytest.approx(4.0, rel=0.05)


def test_answers_that_come_and_go_within_a_window_count_for_their_time() -> None:
    pace, now, number = Pace(), 0.0, 0
    going: dict[int, list[int]] = {}
    draw = random.Random(3)
    for _ in range(40 * STEPS):
        while len(going) < 8:
            number += 1
            count = going[number] = [1, draw.randint(2, 60)]
            pace.begin(number, partial(count.__getitem__, 0), now, texts=1, target_s=TARGET_S)
            pace.set_running(len(going), now)
        now += 0.04
        for one, count in list(going.items()):
            count[0] += 1
            if count[0] >= count[1]:
                del going[one]
                pace.end(one, count[0], now)
        pace.set_running(len(going), now)
        pace.look(now)
    # The number of concurrent answers drops when one ends, but here for no time.
    assert allowed(pace) == pytest.approx(8 * TARGET_S / 0.04, rel=0.15)


def test_what_was_learned_in_a_quiet_time_does_not_bind_a_full_one() -> None:
    pace, tokens, now = Pace(), 1, 0.0
    pace.set_running(1, now)
    pace.begin(0, lambda: tokens, now, texts=1, target_s=TARGET_S)
    for _ in range(10 * STEPS):  # one answer alone: the step time is only its fixed part
        now, tokens = now + 0.04, tokens + 1
        pace.look(now)
    pace.set_running(50, now)
    for number in range(1, 50):
        pace.begin(number, lambda: tokens, now, texts=1, target_s=TARGET_S)
    for _ in range((ENOUGH_WINDOWS + 1) * STEPS):
        now, tokens = now + 0.045, tokens + 1
        pace.look(now)
    assert allowed(pace) == pytest.approx(50 * TARGET_S / 0.045, rel=0.05)


def test_an_end_reported_twice_or_for_an_unknown_number_changes_nothing() -> None:
    answers = Answers(2)
    answers.begin()
    answers.pace.end(0, 5, 1.0)
    answers.pace.end(0, 500, 2.0)
    answers.pace.end(77, 500, 2.0)
    answers.concurrent = 1
    answers.pace.set_running(1, answers.now)
    answers.windows(2 * ENOUGH_WINDOWS, TARGET_S)
    assert allowed(answers.pace) == pytest.approx(1.0, rel=0.2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "step"]), st.integers(0, 5)), max_size=200))
def test_nothing_is_stored_for_answers_that_have_ended(moves: list[tuple[str, int]]) -> None:
    pace, now, tokens = Pace(), 0.0, [1] * 6
    there: set[int] = set()
    for kind, number in moves:
        now += 0.06
        if kind == "begin":
            pace.begin(number, partial(tokens.__getitem__, number), now, texts=1, target_s=TARGET_S)
            there.add(number)
        elif kind == "end":
            pace.end(number, tokens[number], now)
            there.discard(number)
        else:
            tokens[:] = [count + 1 for count in tokens]
            pace.look(now)
        pace.set_running(len(there), now)
        assert set(pace._answering) == there
        found = pace.allows()
        assert found is None or (found[0] >= 0.0 and found[1] >= 0.0)


def test_the_limit_follows_the_pace_down_at_once_but_no_window_too_far() -> None:
    limit = AdaptiveLimit(100)
    limit.paced(allowed=90.0, sequences=95.0)
    assert limit.value == 90
    limit.paced(allowed=10.0, sequences=90.0)
    assert limit.value == int(90 * LEAST_SHARE)


def test_a_pace_within_the_targets_takes_nothing_away_and_does_not_raise_by_itself() -> None:
    limit = AdaptiveLimit(100)
    limit.paced(allowed=50.0, sequences=20.0)  # far from full: 20 run, 50 are allowed
    assert limit.value == 100
    limit.record(in_slo=False, in_flight=50, now=0.0)
    limit.paced(allowed=400.0, sequences=45.0)
    assert limit.value == 45


def test_the_limit_does_not_grow_beyond_what_the_pace_allows() -> None:
    limit = AdaptiveLimit(100)
    limit.paced(allowed=80.0, sequences=100.0)
    for _ in range(500):
        limit.record(in_slo=True, in_flight=80, now=10.0)
    assert limit.value == 80
    limit.paced(allowed=82.5, sequences=80.0)
    for _ in range(500):
        limit.record(in_slo=True, in_flight=limit.value, now=20.0)
    assert limit.value == 83


def test_a_gate_holds_back_while_those_in_flight_are_slow_although_none_has_ended() -> None:
    load = BackendLoad(total_blocks=10_000, block_size=16, max_running=8)
    gate = BackendGate(plain(tpot_slo_s=TARGET_S, max_wait_s=1e6), random=random.Random(1))
    now, tokens = 0.0, 1
    gate.report(load, now)

    def enter() -> AdmissionTicket:
        offered = gate.offer(structs.replace(DEMAND, max_output_tokens=5_000, produced=lambda: tokens), now)
        assert isinstance(offered, AdmissionTicket)
        gate.pump(now)
        return offered

    for ticket in [enter() for _ in range(8)]:
        gate.first_token(ticket, now, 0)
    for _ in range((ENOUGH_WINDOWS + 4) * STEPS):
        now, tokens = now + 0.079, tokens + 1
        gate.report(structs.replace(load, running=8), now)
    assert gate.limit.value == 5, "8 · 50 / 79 ms"
    assert enter().state is TicketState.WAITING
    gate.release(next(iter(gate.work.tickets.values())), SlotOutcome.SUCCEEDED, now, output_tokens=tokens)
    assert gate.pump(now) == []
