"""A backend's standing: the engine's word and what it cannot know yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.signals import Reservations, Unseen, prompt_blocks, standing
from admission.values import Load

LOAD = Load(running=10, waiting=0, kv_usage=0.5, total_blocks=1000, block_size=16, max_running=32)


def test_what_was_admitted_on_a_report_is_not_in_it() -> None:
    reservations = Reservations()
    for _ in range(5):
        reservations.reserve(LOAD, blocks=4)
    assert reservations.unseen(LOAD) == Unseen(5, 20)


def test_a_new_report_contains_what_came_before_it() -> None:
    reservations = Reservations()
    for _ in range(5):
        reservations.reserve(LOAD, blocks=4)
    assert reservations.unseen(Load(running=15, total_blocks=1000)) == Unseen()


def test_a_new_report_with_fewer_sequences_than_slots_lacks_the_newest() -> None:
    reservations = Reservations()
    for blocks in (1, 2, 3, 4):
        reservations.reserve(LOAD, blocks)
    assert reservations.unseen(Load(running=1, waiting=1)) == Unseen(2, 7)


def test_a_released_slot_is_no_longer_counted() -> None:
    reservations = Reservations()
    first = reservations.reserve(LOAD, 4)
    reservations.reserve(LOAD, 5)
    reservations.release(first)
    assert len(reservations) == 1
    assert reservations.unseen(LOAD) == Unseen(1, 5)


def test_a_ticket_released_twice_is_a_defect() -> None:
    reservations = Reservations()
    ticket = reservations.reserve(None, 0)
    reservations.release(ticket)
    with pytest.raises(KeyError):
        reservations.release(ticket)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 2), (31, 2), (32, 3)])
def test_a_prompt_takes_the_blocks_of_its_tokens_and_of_the_first_answer_token(
    tokens: int, blocks: int
) -> None:
    assert prompt_blocks(tokens, LOAD) == blocks


@pytest.mark.parametrize("load", [None, Load()])
def test_without_a_known_block_size_a_prompt_takes_no_known_blocks(load: Load | None) -> None:
    assert prompt_blocks(1000, load) == 0


def test_without_a_known_load_only_the_own_slots_count() -> None:
    state = standing(None, in_flight=7, unseen=Unseen(), blocks=0)
    assert (state.queue_depth, state.ahead, state.capacity, state.kv_usage) == (7, 7, 0, 0.0)


def test_what_the_batch_still_takes_does_not_wait_for_others_to_end() -> None:
    state = standing(LOAD, in_flight=22, unseen=Unseen(12, 0), blocks=4)
    assert (state.ahead, state.capacity) == (0, 32)


def test_what_exceeds_the_batch_waits() -> None:
    state = standing(LOAD, in_flight=42, unseen=Unseen(32, 0), blocks=4)
    assert (state.queue_depth, state.ahead) == (10, 10)


def test_a_pool_without_room_for_the_prompt_is_full_whatever_the_batch_says() -> None:
    load = Load(running=10, waiting=3, kv_usage=0.9, total_blocks=1000, block_size=16, max_running=32)
    state = standing(load, in_flight=13, unseen=Unseen(), blocks=101)
    assert (state.ahead, state.capacity) == (3, 10)


def test_an_unknown_batch_size_lets_the_queue_be_counted_but_not_timed() -> None:
    state = standing(Load(running=10, waiting=3), in_flight=15, unseen=Unseen(2, 0), blocks=0)
    assert (state.queue_depth, state.ahead, state.capacity) == (5, 5, 0)


def test_prompts_on_their_way_count_as_blocks_in_use() -> None:
    assert standing(LOAD, in_flight=5, unseen=Unseen(5, 100), blocks=4).kv_usage == pytest.approx(0.6)


@given(
    load=st.builds(
        Load,
        running=st.integers(0, 64),
        waiting=st.integers(0, 200),
        kv_usage=st.floats(0, 1),
        total_blocks=st.sampled_from([0, 10, 1000]),
        block_size=st.just(16),
        max_running=st.sampled_from([0, 1, 32, 64]),
    ),
    unseen=st.builds(Unseen, st.integers(0, 200), st.integers(0, 500)),
    blocks=st.integers(0, 300),
)
def test_no_figure_is_below_what_the_engine_itself_reports(load: Load, unseen: Unseen, blocks: int) -> None:
    state = standing(load, in_flight=0, unseen=unseen, blocks=blocks)
    assert state.queue_depth >= load.waiting
    assert state.kv_usage >= load.kv_usage
    assert 0 <= state.ahead <= state.queue_depth
    assert state.ahead >= load.waiting + unseen.sequences - max(0, load.max_running - load.running)
