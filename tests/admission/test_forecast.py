"""The forecast of KV memory, against a simulation that steps through every token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.forecast import ForecastEntry, KvForecast, KvPoolTokens, ReservedTokens, fullest

ANY = st.lists(
    st.builds(ReservedTokens, st.integers(0, 500), st.integers(1, 200), st.integers(0, 200)), max_size=30
)


def stepped(held: list[ReservedTokens]) -> int:
    """The most tokens held at any step, by simulation: each sequence grows until its end, then is removed."""
    peak = 0
    for step in range(1, 302):
        peak = max(peak, sum(one.now + step for one in held if one.steps_left >= step))
    return peak


def longest_first(held: list[ReservedTokens]) -> list[ForecastEntry]:
    return sorted(one.forecast_entry for one in held)


@given(ANY)
def test_the_peak_is_what_stepping_through_every_token_finds(held: list[ReservedTokens]) -> None:
    assert fullest(longest_first(held)).tokens == stepped(held)


@given(ANY, st.builds(ReservedTokens, st.integers(0, 500), st.integers(1, 200)))
def test_one_more_sequence_never_lowers_the_peak(held: list[ReservedTokens], more: ReservedTokens) -> None:
    assert fullest(longest_first(held), extra=more).tokens >= fullest(longest_first(held)).tokens


def test_a_sequence_that_ends_soon_makes_room_for_one_that_grows_late() -> None:
    short, long = ReservedTokens(1000, 10), ReservedTokens(10, 500)
    assert (
        fullest(longest_first([short, long])).tokens
        < short.now + short.steps_left + long.now + long.steps_left
    )


def test_what_the_engine_holds_beyond_our_own_counts_stays_in_the_forecast() -> None:
    forecast = KvForecast()
    forecast.add(1, ReservedTokens(84, 100))
    pool = KvPoolTokens(total_blocks=100, block_size=10)
    assert forecast.usage(pool) == pytest.approx((84 + 5 + 100) / 1000)
    assert forecast.usage(pool, used=0.5) == pytest.approx((500 + 100) / 1000)


MORE = st.builds(ReservedTokens, st.integers(0, 500), st.integers(1, 200))


@given(ANY, st.lists(st.tuples(MORE, st.integers(0, 9)), min_size=1, max_size=8), st.integers(1, 20_000))
def test_a_sequence_fits_if_it_keeps_the_peak_below_the_share(
    held: list[ReservedTokens], asked: list[tuple[ReservedTokens, int]], blocks: int
) -> None:
    forecast, pool = KvForecast(), KvPoolTokens(blocks, 1)
    there = dict(enumerate(held))
    for ticket, one in there.items():
        forecast.add(ticket, one)
    for number, (more, what) in enumerate(asked):
        fits = forecast.fits(pool, 0.9, used=0.0, extra=more)
        assert fits == (stepped([*there.values(), more]) <= 0.9 * pool.tokens)
        if what == 0 and there:
            there.pop(gone := next(iter(there)))
            forecast.remove(gone)
        elif what == 1 and there:
            forecast.produced(last := next(reversed(there)), 7, there[last].expected + 3)
            there[last] = forecast.get(last)
        elif what == 2 and there:
            forecast.cached(first := next(iter(there)), 3)
            there[first] = forecast.get(first)
        elif what > 4:
            there[100 + number] = more
            forecast.add(100 + number, more)


def test_an_unknown_pool_is_never_full() -> None:
    forecast = KvForecast()
    forecast.add(1, ReservedTokens(10_000, 10_000))
    assert forecast.usage(KvPoolTokens()) == 0.0


def test_a_ticket_that_is_removed_twice_is_a_defect() -> None:
    forecast = KvForecast()
    forecast.add(1, ReservedTokens(1, 1))
    forecast.remove(1)
    with pytest.raises(KeyError):
        forecast.remove(1)


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 300), st.integers(0, 300), st.integers(0, 400)),
        max_size=20,
    )
)
def test_totals_and_peak_match_the_held_sequences_after_any_updates(
    steps: list[tuple[int, int, int, int]],
) -> None:
    forecast = KvForecast()
    for ticket, (prompt, expected, produced, private) in enumerate(steps):
        forecast.add(ticket, ReservedTokens(prompt, expected))
        forecast.produced(ticket, produced, max(expected, produced + 1))
        forecast.cached(ticket, private)
        if ticket % 4 == 3:
            forecast.sort()
        if ticket % 3 == 2:
            forecast.remove(ticket - 1)
    current = [forecast.get(t) for t in range(len(steps)) if not (t % 3 == 1 and t + 1 < len(steps))]
    assert forecast.now_tokens == sum(one.now for one in current)
    pool = KvPoolTokens(1000, 1)
    assert forecast.usage(pool) == stepped(current) / pool.tokens
