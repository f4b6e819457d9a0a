"""What the gate learns: lengths of answers, rates, cached shares, the limit, the circuit, the ladder."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.circuit import BUCKET_S, OPEN_S, WINDOW_S, Circuit, CircuitState
from admission.ladder import RUNGS, Ladder, Rung
from admission.lengths import (
    BUCKETS,
    DECAY,
    FIRST_GUESS,
    STEPS_PER_OCTAVE,
    UPPER_EDGES,
    LengthHistogram,
    OutputLengths,
    bucket_of,
)
from admission.limit import SETTLE_S, AdaptiveLimit
from admission.rates import (
    MAX_KINDS,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    CachedShares,
    Mean,
    Rates,
    retry_after_s,
)
from tests.admission.gate_rig import first_token_s


def test_an_answer_of_unknown_length_is_expected_to_use_its_whole_cap() -> None:
    assert OutputLengths(0.8).expect("chat", 500) == 500


def test_an_answer_with_the_rest_of_the_context_is_guessed_until_lengths_are_known() -> None:
    lengths = OutputLengths(0.8)
    assert lengths.expect("chat", 30_000, open_ended=True) == FIRST_GUESS
    assert lengths.expect("chat", 300, open_ended=True) == 300
    assert lengths.expect("chat", 30_000, produced=600, open_ended=True) == 1_200
    for _ in range(30):
        lengths.learn("chat", 100)
    assert 100 <= lengths.expect("chat", 30_000, open_ended=True) < 120


def test_the_expected_length_is_the_quantile_of_what_was_seen_within_a_bucket() -> None:
    lengths, draw = OutputLengths(0.8), random.Random(3)
    for _ in range(2000):
        lengths.learn("chat", draw.randint(1, 1000))
    assert 800 <= lengths.expect("chat", 10_000) <= 800 * 1.19 * 1.05
    assert lengths.expect("chat", 300) == 300


def test_the_expected_length_is_that_of_all_answers_with_their_weights_after_any_number_of_them() -> None:
    draw, histogram = random.Random(5), LengthHistogram()
    weights = [0.0] * BUCKETS
    for number in range(20_000):  # the sums are scaled down once
        # Long and short answers take turns, so that the quantile moves both ways.
        bucket = bucket_of(draw.randint(1, 2_000 if number // 700 % 2 else 50))
        weights = [weight * DECAY for weight in weights]
        weights[bucket] += 1.0
        histogram.learn(bucket)
        if number % 7:
            continue
        found, wanted = histogram.quantile(0.8), 0.8 * sum(weights)
        edge = next(at for at, _ in enumerate(weights) if sum(weights[: at + 1]) >= wanted * (1 - 1e-9))
        assert found == UPPER_EDGES[edge]


def test_a_bucket_has_the_lengths_up_to_its_edge() -> None:
    for tokens in (*range(1, 5_000), *(2**power for power in range(20))):
        assert bucket_of(tokens) == math.ceil(math.log2(tokens) * STEPS_PER_OCTAVE)
    assert bucket_of(0) == 0
    assert bucket_of(10**9) == BUCKETS - 1


def test_an_answer_longer_than_expected_is_measured_against_those_as_long_as_itself() -> None:
    lengths = OutputLengths(0.8)
    for tokens in [10] * 90 + [400] * 10:
        lengths.learn("chat", tokens)
    assert lengths.expect("chat", 1000) < 20
    assert 400 <= lengths.expect("chat", 1000, produced=50) <= 480
    assert lengths.expect("chat", 1000, produced=900) == 1000


def test_a_new_kind_is_taken_to_be_like_all_the_others_until_it_has_shown_itself() -> None:
    lengths = OutputLengths(0.5)
    for _ in range(100):
        lengths.learn("known", 20)
    assert lengths.expect("new", 500) <= 24


def test_the_kinds_that_are_remembered_are_bounded() -> None:
    lengths = OutputLengths(0.5)
    for number in range(3 * MAX_KINDS):
        lengths.learn(number, 10)
    assert len(lengths._kinds) == MAX_KINDS


def test_a_change_of_regime_is_followed() -> None:
    lengths = OutputLengths(0.8)
    for tokens in [800] * 1000 + [20] * 1500:
        lengths.learn("chat", tokens)
    assert lengths.expect("chat", 1000) < 30


@given(st.lists(st.integers(1, 5000), max_size=200), st.integers(1, 5000), st.integers(0, 4999))
def test_an_expectation_lies_between_what_is_there_and_the_cap(seen: list[int], cap: int, there: int) -> None:
    lengths = OutputLengths(0.8)
    for tokens in seen:
        lengths.learn("k", tokens)
    assert min(cap, there + 1) <= lengths.expect("k", cap, produced=min(there, cap)) <= cap


def test_the_prefill_rate_and_the_step_time_are_learned_separately() -> None:
    rates, draw = Rates(), random.Random(5)
    for _ in range(200):
        tokens = draw.randint(10, 3000)
        rates.first_token(tokens, 0.02 + tokens * 0.0005)
    assert rates.s_per_token == pytest.approx(0.0005, rel=0.02)
    assert rates.step_s == pytest.approx(0.02, rel=0.1)
    assert first_token_s(rates, 1000) == pytest.approx(0.52, rel=0.02)


def test_prompts_of_one_length_only_still_give_a_rate() -> None:
    rates = Rates()
    for _ in range(20):
        rates.first_token(1000, 0.5)
    assert first_token_s(rates, 1000) == pytest.approx(0.5, rel=0.01)


def test_a_mean_is_plain_at_first_and_follows_later() -> None:
    mean = Mean()
    for sample in (1.0, 3.0):
        mean.learn(sample)
    assert mean.value == 2.0
    for _ in range(60):
        mean.learn(10.0)
    assert mean.value == pytest.approx(10.0, abs=0.1)


def test_the_cached_share_is_learned_by_kind_and_unknown_kinds_have_none() -> None:
    shares = CachedShares()
    shares.learn("chat", 750, 1000)
    shares.learn("empty", 0, 0)
    assert (shares.expect("chat", 2000), shares.expect("other", 2000), shares.expect("empty", 10)) == (
        1500,
        0,
        0,
    )


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_retry_after_is_at_least_the_expected_wait_within_bounds(
    wait: float, turn: float, jitter: float
) -> None:
    again = retry_after_s(wait, turn, jitter)
    assert MIN_RETRY_AFTER_S <= again <= MAX_RETRY_AFTER_S * 1.25
    assert again >= min(wait, MAX_RETRY_AFTER_S)


def test_the_limit_shrinks_once_per_settling_and_from_where_the_load_is() -> None:
    limit = AdaptiveLimit(128)
    limit.record(in_slo=False, in_flight=50, now=0.0)
    limit.record(in_slo=False, in_flight=50, now=SETTLE_S / 2)
    assert limit.value == 45
    limit.record(in_slo=False, in_flight=45, now=SETTLE_S)
    assert limit.value == 40


def test_the_limit_grows_only_while_it_is_what_holds_requests_back() -> None:
    limit = AdaptiveLimit(16)
    limit.record(in_slo=False, in_flight=10, now=0.0)
    for _ in range(100):
        limit.record(in_slo=True, in_flight=3, now=10.0)
    assert limit.value == 9
    for _ in range(9):
        limit.record(in_slo=True, in_flight=9, now=10.0)
    assert limit.value == 10


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.floats(0, 100)), max_size=300))
def test_the_limit_stays_within_its_bounds(samples: list[tuple[bool, int, float]]) -> None:
    limit = AdaptiveLimit(64)
    for good, in_flight, now in samples:
        limit.record(in_slo=good, in_flight=in_flight, now=now)
        assert 1 <= limit.value <= 64


def test_the_engines_own_bound_moves_a_limit_that_was_at_the_top() -> None:
    limit = AdaptiveLimit(256)
    limit.bound(32)
    assert limit.value == 32
    limit.bound(64)
    assert limit.value == 64
    limit.record(in_slo=False, in_flight=20, now=0.0)
    limit.bound(128)
    assert limit.value == 18


def test_the_circuit_closes_again_when_the_failures_have_left_the_window() -> None:
    circuit = Circuit()
    for _ in range(20):
        circuit.record(True, 0.0)
    assert circuit.state(1.0) is CircuitState.OPEN
    assert circuit.retry_after_s(1.0) == pytest.approx(OPEN_S - 1.0)
    assert circuit.state(OPEN_S) is CircuitState.HALF_OPEN
    assert [circuit.admits(OPEN_S) for _ in range(20)].count(True) == 2
    assert circuit.state(WINDOW_S + 2.0) is CircuitState.CLOSED


def test_the_first_request_after_the_open_state_is_admitted_whatever_came_before() -> None:
    circuit = Circuit()
    for failed in [False] * 7 + [True] * 3:
        circuit.record(failed, 0.0)
    assert [circuit.admits(0.0) for _ in range(3)] == [True, False, False]
    for _ in range(10):
        circuit.record(True, 1.0)
    asked_at = 1.0 + circuit.retry_after_s(1.0)
    assert not circuit.admits(asked_at - 0.1)
    assert [circuit.admits(asked_at) for _ in range(3)] == [True, False, False]


def test_a_half_open_circuit_names_the_time_at_which_it_closes_without_further_answers() -> None:
    circuit = Circuit()
    for second in range(40):
        circuit.record(second % 4 == 3, float(second))  # a quarter fails
    assert circuit.state(40.0) is CircuitState.HALF_OPEN
    wait_s = circuit.retry_after_s(40.0)
    assert circuit.state(40.0 + wait_s) is CircuitState.HALF_OPEN
    assert circuit.state(40.0 + wait_s + BUCKET_S) is CircuitState.CLOSED
    assert circuit.retry_after_s(40.0 + wait_s + BUCKET_S) == 0.0


def test_a_few_failures_do_not_open_the_circuit() -> None:
    circuit = Circuit()
    for _ in range(9):
        circuit.record(True, 0.0)
    assert circuit.state(0.0) is CircuitState.CLOSED


def test_the_circuits_memory_does_not_grow_with_the_load() -> None:
    circuit = Circuit()
    for number in range(100_000):
        circuit.record(False, number * 0.01)
    assert len(circuit._buckets) <= WINDOW_S + 2


def test_a_level_does_what_the_levels_below_it_do() -> None:
    ladder = Ladder([Rung(9, shed_all=True), Rung(2, max_tokens=30), Rung(4, shed_low=True), Rung(6, 50)])
    assert [ladder.at(depth) for depth in (2, 4, 6, 9)] == [
        Rung(2, max_tokens=30),
        Rung(4, max_tokens=30, shed_low=True),
        Rung(6, max_tokens=30, shed_low=True),
        Rung(9, max_tokens=30, shed_low=True, shed_all=True),
    ]


@given(st.lists(st.integers(0, 1500), max_size=100))
def test_the_rung_is_never_below_the_depth_nor_above_the_hysteresis(
    depths: list[int],
) -> None:
    ladder = Ladder()
    for depth in depths:
        ladder.at(depth)
        must = sum(depth >= rung.depth for rung in RUNGS)
        may = sum(depth >= rung.depth * 0.8 for rung in RUNGS)
        assert must <= ladder.climbed(depth) <= may
