"""The choice of a worker: bounded load, the longest cached prefix, and a stable assignment of keys."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgeting.token_ids import PieceIds
from gateway.backends.prefix_hash import fingerprint, salt_number
from gateway.backends.workers.worker_choice import (
    CACHED_FACTOR,
    Ring,
    SentIndex,
    WorkerChoice,
    WorkerPreference,
    WorkerView,
)

NAMES = [f"http://10.0.0.{number}:8001/v1" for number in range(16)]
requests = st.floats(0, 50) | st.integers(0, 50)
views = st.lists(
    st.builds(
        WorkerView,
        name=st.sampled_from(NAMES),
        requests=requests,
        kv_usage=st.floats(0, 1),
        weight=st.floats(0.1, 1),
        adapters=st.frozensets(st.sampled_from(["a", "b"])),
    ),
    min_size=1,
    unique_by=lambda view: view.name,
)
preferences = st.builds(
    WorkerPreference,
    chain=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8),
    stable_blocks=st.integers(0, 8),
    adapter=st.none() | st.sampled_from(["a", "b"]),
)


def ids_of(pieces: Sequence[Sequence[int]]) -> PieceIds:
    return PieceIds([tuple(piece) for piece in pieces], sum(map(len, pieces)))


def chain_of(ids: Sequence[int], block_tokens: int) -> list[int]:
    return fingerprint(tuple(ids), 0, block_tokens, 7).chain


def view(number: int, requests: float = 0, **changes: object) -> WorkerView:
    return WorkerView(NAMES[number], requests, **changes)  # type: ignore[arg-type]


@settings(deadline=None)
@given(views, preferences, st.floats(1, 3), st.booleans())
def test_a_worker_under_the_bound_always_exists_and_is_chosen(
    workers: list[WorkerView], preference: WorkerPreference, factor: float, affinity: bool
) -> None:
    choice = WorkerChoice(NAMES, factor=factor, affinity=affinity)
    chosen = choice.choose(preference, workers)
    [worker] = [one for one in workers if one.name == chosen]
    share = (sum(one.requests for one in workers) + 1) / sum(one.weight for one in workers)
    assert worker.requests < factor * share * worker.weight


@settings(deadline=None)
@given(views, st.lists(preferences, min_size=1, max_size=8), st.floats(1, 3))
def test_no_history_takes_a_choice_further_over_the_bound_than_a_cached_prompt_may(
    workers: list[WorkerView], history: list[WorkerPreference], factor: float
) -> None:
    choice = WorkerChoice(NAMES, factor=factor)
    share = (sum(one.requests for one in workers) + 1) / sum(one.weight for one in workers)
    for preference in history:
        name = choice.choose(preference, workers)
        assert name is not None
        [worker] = [one for one in workers if one.name == name]
        assert worker.requests < (factor + CACHED_FACTOR) * share * worker.weight
        choice.sent(name, preference)


@pytest.mark.parametrize(("chain", "requests", "stays"), [
    ([1, 2, 3, 4], 4, True),  # all of it is cached, and 4 < 1.75 times the share of 2.5
    ([1, 2, 3, 4], 8, False),  # all of it is cached, but 8 > 1.75 times the share of 4.5
    ([1, 2, 7, 8], 4, False),  # half of it is cached
    ([5, 6, 7, 8], 4, False),
])  # fmt: skip
def test_a_cached_prompt_stays_at_its_worker_somewhat_longer_than_another_one(
    chain: list[int], requests: int, stays: bool
) -> None:
    choice = WorkerChoice(NAMES[:2], factor=1.25)
    choice.sent(NAMES[0], WorkerPreference([1, 2, 3, 4]))
    chosen = choice.choose(WorkerPreference(chain, 1), [view(0, requests), view(1)])
    assert (chosen == NAMES[0]) is stays


@settings(deadline=None)
@given(views, st.lists(preferences, min_size=1, max_size=8))
def test_the_same_history_gives_the_same_choices(
    workers: list[WorkerView], history: list[WorkerPreference]
) -> None:
    def choices() -> list[str | None]:
        choice, made = WorkerChoice(NAMES), []
        for preference in history:
            name = choice.choose(preference, workers)
            assert name is not None
            choice.sent(name, preference)
            made.append(name)
        return made

    assert choices() == choices()


@settings(deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=2, unique=True), st.lists(st.integers(), min_size=1))
def test_taking_a_worker_away_moves_its_own_keys_alone(names: list[str], keys: list[int]) -> None:
    before, after = Ring(names), Ring(names[1:])
    rest = frozenset(names[1:])
    for key in keys:
        home = before.first(key, frozenset(names))
        assert after.first(key, rest) == (before.first(key, rest) if home == names[0] else home)


def test_adding_a_worker_moves_about_one_key_in_n() -> None:
    before, after = Ring(NAMES[:15]), Ring(NAMES)
    everyone, less = frozenset(NAMES), frozenset(NAMES[:15])
    moved = [
        after.first(key, everyone)
        for key in range(4000)
        if before.first(key, less) != after.first(key, everyone)
    ]
    assert set(moved) == {NAMES[15]}
    assert 0.5 / 16 < len(moved) / 4000 < 2 / 16


def test_a_ring_that_was_resized_is_the_ring_of_those_names() -> None:
    ring = Ring(NAMES[:10])
    ring.resize(NAMES[3:])
    anew = Ring(NAMES[3:])
    count = len(NAMES[3:])
    assert [ring.near(key, count) for key in range(200)] == [anew.near(key, count) for key in range(200)]


def test_keys_are_spread_evenly() -> None:
    ring, everyone = Ring(NAMES), frozenset(NAMES)
    counts = dict.fromkeys(NAMES, 0)
    for key in range(8000):
        name = ring.first(key, everyone)
        assert name is not None
        counts[name] += 1
    assert max(counts.values()) < 1.5 * 8000 / 16


def test_a_conversation_goes_back_to_the_worker_that_has_most_of_it() -> None:
    choice = WorkerChoice(NAMES[:4])
    workers = [view(number) for number in range(4)]
    choice.sent(NAMES[1], WorkerPreference([1, 2]))
    choice.sent(NAMES[3], WorkerPreference([1, 2, 3, 4]))
    assert choice.choose(WorkerPreference([1, 2, 3, 4, 5, 6], 1), workers) == NAMES[3]
    assert choice.choose(WorkerPreference([1, 2, 9], 1), workers) in (NAMES[1], NAMES[3])


def test_of_workers_that_have_the_same_beginning_the_least_loaded_is_taken() -> None:
    choice = WorkerChoice(NAMES[:3])
    for number in range(3):
        choice.sent(NAMES[number], WorkerPreference([1]))
    assert choice.choose(WorkerPreference([1, 2], 1), [view(0, 3), view(1, 1), view(2, 2)]) == NAMES[1]


def test_a_prefix_goes_to_another_worker_once_its_own_has_more_than_its_share() -> None:
    choice = WorkerChoice(NAMES[:4])
    choice.sent(NAMES[0], WorkerPreference([1, 2, 3]))
    preference = WorkerPreference([1, 2, 3], 3)
    assert choice.choose(preference, [view(0, 4), view(1, 4), view(2, 4), view(3, 4)]) == NAMES[0]
    assert choice.choose(preference, [view(0, 12), view(1, 4), view(2, 4), view(3, 4)]) != NAMES[0]


def test_prompts_of_one_stable_prefix_begin_on_one_worker() -> None:
    workers = [view(number) for number in range(8)]
    first = {
        WorkerChoice(NAMES[:8]).choose(WorkerPreference([1, 2, 100 + number], 2), workers)
        for number in range(20)
    }
    assert len(first) == 1


def test_a_new_prefix_goes_to_a_worker_that_holds_its_adapter() -> None:
    workers = [view(number, adapters=frozenset({"a"} if number == 5 else ())) for number in range(8)]
    for number in range(20):
        assert WorkerChoice(NAMES[:8]).choose(WorkerPreference([number], 1, "a"), workers) == NAMES[5]


def test_an_adapter_goes_back_to_where_it_was_last_sent() -> None:
    choice = WorkerChoice(NAMES[:8])
    workers = [view(number) for number in range(8)]
    choice.sent(NAMES[6], WorkerPreference([1], 0, "a"))
    assert choice.choose(WorkerPreference([2], 0, "a"), workers) == NAMES[6]
    assert choice.choose(WorkerPreference((), 0, "a"), workers) == NAMES[6]
    for number in range(8):
        choice.sent(NAMES[6], WorkerPreference([3], 0, f"other-{number}"))
    assert choice.choose(WorkerPreference((), 0, "a"), workers) != NAMES[6], "eight others have pushed it out"
    choice.forget(NAMES[6])
    assert choice.choose(WorkerPreference((), 0, "other-7"), workers) != NAMES[6]


def test_without_a_fingerprint_load_alone_decides_and_equals_take_turns() -> None:
    choice = WorkerChoice(NAMES[:3])
    assert choice.choose(WorkerPreference(), [view(0, 2), view(1, 1), view(2, 3)]) == NAMES[1]
    order = []
    for _ in range(6):
        name = choice.choose(WorkerPreference(), [view(0), view(1), view(2)])
        assert name is not None
        choice.sent(name, WorkerPreference())
        order.append(name)
    assert order == NAMES[:3] * 2


def test_a_full_cache_counts_like_load() -> None:
    choice = WorkerChoice(NAMES[:2], affinity=False)
    assert (
        choice.choose(WorkerPreference(), [view(0, 1, kv_usage=0.99), view(1, 2, kv_usage=0.3)]) == NAMES[1]
    )


def test_a_worker_that_is_coming_back_gets_a_smaller_share() -> None:
    choice = WorkerChoice(NAMES[:2], affinity=False)
    assert choice.choose(WorkerPreference(), [view(0, 1, weight=0.1), view(1, 5)]) == NAMES[1]
    assert choice.choose(WorkerPreference(), [view(0, 0, weight=0.2), view(1, 30)]) == NAMES[0]


def test_there_is_no_choice_without_workers() -> None:
    assert WorkerChoice(NAMES).choose(WorkerPreference([1], 1), []) is None


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=30), st.integers(1, 8))
def test_the_index_of_sent_chains_is_bounded_and_a_match_was_sent(chains: list[list[int]], most: int) -> None:
    index = SentIndex(most)
    linked = [[hash(tuple(chain[: end + 1])) for end in range(len(chain))] for chain in chains]
    for chain in linked:
        index.add(chain)
        assert len(index._blocks) <= most
    for chain in linked:
        match = index.match(chain)
        assert not match or any(chain[match - 1] in sent for sent in linked)


def test_a_chain_is_forgotten_from_its_end() -> None:
    index = SentIndex(4)
    index.add([1, 2, 3])
    index.add([10, 20])
    assert index.match([1, 2, 3]) == 2
    index.clear()
    assert index.match([10, 20]) == 0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 99), max_size=64), st.lists(st.integers(0, 99), max_size=64), st.integers(1, 16)
)
def test_chains_agree_exactly_as_far_as_whole_blocks_do(
    left: list[int], right: list[int], block: int
) -> None:
    one, two = chain_of(left, block), chain_of(right, block)
    assert len(one) == len(left) // block
    for number in range(min(len(one), len(two))):
        end = (number + 1) * block
        assert (one[number] == two[number]) == (left[:end] == right[:end])


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=9),
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=9),
    st.integers(1, 5),
    st.integers(0, 90),
)
def test_ids_in_pieces_have_a_chain_of_their_common_pieces(
    left: list[list[int]], right: list[list[int]], block: int, prefix: int
) -> None:
    common = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    shared = fingerprint(ids_of([one for one, _ in common]), prefix, block, 7)
    for pieces in (left, right):
        found = fingerprint(ids_of(pieces), prefix, block, 7)
        assert found == fingerprint(ids_of(pieces), prefix, block, 7)  # cached now
        assert found.chain[: len(shared.chain)] == shared.chain
        tokens = sum(map(len, pieces))
        assert len(found.chain) <= tokens // block
        # A block has at most the rests of the pieces before it in addition.
        assert (len(found.chain) + 1) * (2 * block - 1) > tokens
        assert shared.stable <= found.stable <= min(len(found.chain), prefix // block)
        if prefix >= tokens:
            assert found.stable == len(found.chain)
    one = fingerprint(ids_of([*left, [9]]), 0, 1, 7).chain
    assert one[-1] != fingerprint(ids_of([*right, [8]]), 0, 1, 7).chain[-1]


def test_a_piece_in_another_place_is_another_block() -> None:
    first, second = tuple(range(64)), tuple(range(64, 128))
    one, other = (
        fingerprint(PieceIds(pieces, 128), 0, 64, 7).chain for pieces in ((first, second), (second, first))
    )
    assert not set(one) & set(other)


def test_tenants_and_adapters_have_chains_of_their_own() -> None:
    prompt = tuple(range(64))
    salts = [salt_number(*pair) for pair in ((None, None), ("acme", None), ("acme", "a"), ("umbra", "a"))]
    assert len({fingerprint(prompt, 0, 16, salt).chain[0] for salt in salts}) == 4


def test_a_long_prompt_has_a_bounded_chain() -> None:
    assert len(chain_of(range(100_000), 1)) == 1024


@pytest.mark.serial
def test_a_choice_among_16_workers_for_3600_tokens_costs_little() -> None:
    """The bar is 50 µs on a quiet core; the bound here allows for a busy one."""
    rng = random.Random(5)
    choice = WorkerChoice(NAMES)
    workers = [view(number, rng.randrange(8), kv_usage=rng.random()) for number in range(16)]
    prompts = [tuple(rng.choices(range(4096), k=3600)) for _ in range(50)]
    best = float("inf")
    for prompt in prompts:
        began = time.perf_counter()
        chain = chain_of(prompt, 64)
        name = choice.choose(WorkerPreference(chain, 4), workers)
        best = min(best, time.perf_counter() - began)
        assert name is not None
        choice.sent(name, WorkerPreference(chain))
    assert best < 200e-6
