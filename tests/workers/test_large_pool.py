"""A pool too large to look at all workers for each request still chooses and reports like a small one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from admission.values import BackendLoad, Reason
from benchmarks.fleet.front import Known
from gateway.backends.workers.load import STALE_INTERVALS, WorkerFigures
from gateway.backends.workers.pool import MAX_SNAPSHOT_AGE_S, WHOLE_UP_TO, WorkerPool
from gateway.backends.workers.shortlist import PLACES, WORKERS_PER_KEY, Hints
from gateway.backends.workers.worker_choice import WorkerChoice, WorkerPreference
from tests.admission.gate_rig import GateRig

MANY = 200
IDLE = WorkerFigures(BackendLoad(kv_usage=0.1, total_blocks=100, block_size=16))


def made(size: int = MANY, whole_up_to: int = WHOLE_UP_TO) -> tuple[WorkerPool[Known], list[Known]]:
    members = [Known(number, interval_s=1.0, max_running=8) for number in range(size)]
    for member in members:
        member.load.scraped(IDLE, 0.0)
    choice = WorkerChoice([member.url for member in members])
    draws = random.Random(1)
    return WorkerPool(members, choice, max_running=8, random=draws, whole_up_to=whole_up_to), members


def placed(pool: WorkerPool[Known], preference: WorkerPreference, now: float = 0.0) -> tuple[Known, int]:
    member = pool.pick(preference, (), now)
    assert member is not None
    return member, pool.sent(member, 64, preference)


def conversation(number: int, blocks: int) -> WorkerPreference:
    return WorkerPreference([number * 1000 + block for block in range(blocks)], stable_blocks=1)


def test_a_conversation_goes_back_to_its_worker() -> None:
    pool, _ = made()
    homes = {}
    for number in range(300):
        homes[number], ticket = placed(pool, conversation(number, 5))
        pool.ended(homes[number], ticket)
    for number in range(300):
        assert pool.pick(conversation(number, 9), (), 0.1) is homes[number]


def test_conversations_that_begin_alike_each_go_back_to_their_own_worker() -> None:
    pool, _ = made()
    shared = list(range(20))
    chosen, tickets = {}, {}
    for number in range(100):
        chosen[number], tickets[number] = placed(
            pool, WorkerPreference([*shared, *range(number * 1000 + 1000, number * 1000 + 1007)], 20)
        )
    assert len({member.url for member in chosen.values()}) > 20, "a beginning that all share spreads"
    for number, ticket in tickets.items():
        pool.ended(chosen[number], ticket)
    back = [
        pool.pick(
            WorkerPreference([*shared, *range(number * 1000 + 1000, number * 1000 + 1009)], 20), (), 0.1
        )
        is chosen[number]
        for number in chosen
    ]
    assert all(back)


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 6]))
def test_the_load_is_spread_nearly_as_if_all_were_looked_at(seed: int, blocks: int) -> None:
    pool, members = made()
    draw = random.Random(seed)
    for _ in range(5 * MANY):
        placed(pool, conversation(draw.randrange(1 << 40), blocks))
    counts = [member.load.in_flight for member in members]
    assert max(counts) <= 2 * 5
    assert sum(count < 2 for count in counts) < 0.1 * MANY


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), min_size=33, max_size=60))
def test_a_large_pools_load_is_the_sum_of_its_workers_at_a_snapshot(
    reported: list[tuple[int, int, int]],
) -> None:
    (large, some), (small, others) = made(len(reported)), made(len(reported), len(reported))
    for pool, members in ((large, some), (small, others)):
        for member, (running, waiting, ours) in zip(members, reported, strict=True):
            for _ in range(ours):
                pool.sent(member, 64, WorkerPreference())
            member.load.scraped(WorkerFigures(replace(IDLE.load, running=running, waiting=waiting)), 1.0)
    assert large.load(1.0) == small.load(1.0)


def test_between_two_snapshots_a_pools_load_has_our_own_requests() -> None:
    pool, _ = made()
    first = pool.load(0.0)
    assert first is not None and (first.running, first.waiting) == (0, 0)
    out = [placed(pool, conversation(number, 2)) for number in range(30)]
    reported = pool.load(MAX_SNAPSHOT_AGE_S / 2)
    assert reported is not None and (reported.running, reported.workers) == (30, MANY)
    for member, ticket in out:
        pool.ended(member, ticket)
    reported = pool.load(MAX_SNAPSHOT_AGE_S / 2)
    assert reported is not None and reported.running == 0


def test_neither_those_tried_nor_those_out_of_service_are_picked() -> None:
    pool, members = made()
    home, _ = placed(pool, conversation(1, 5))
    other = pool.pick(conversation(1, 5), {home.url}, 0.0)
    assert other is not None and other is not home
    for member in members[: MANY - 3]:
        member.health.probe_failed(0.1)
        member.health.probe_failed(0.1)
    # At once, before the next snapshot; and if no worker of a shortlist is in service, all are considered.
    picked = Counter(pool.pick(conversation(number, 5), (), 0.1) for number in range(50))
    assert set(picked) <= set(members[MANY - 3 :])


def test_without_a_worker_in_service_none_is_picked_and_the_first_back_is_found_at_once() -> None:
    pool, members = made()
    for member in members:
        member.health.probe_failed(0.1)
        member.health.probe_failed(0.1)
    assert (
        pool.pick(conversation(1, 5), (), 0.1 + MAX_SNAPSHOT_AGE_S) is None
        and pool.load(0.1 + MAX_SNAPSHOT_AGE_S) is None
    )
    members[7].health.probe_succeeded(10.0)
    assert pool.pick(conversation(1, 5), (), 10.0) is members[7]


def test_an_adapter_goes_where_it_was() -> None:
    pool, members = made()
    for number in range(8):
        pool.ended(
            members[number], pool.sent(members[number], 64, WorkerPreference((), adapter=f"a-{number}"))
        )
    for number in range(8):
        assert pool.pick(WorkerPreference((), adapter=f"a-{number}"), (), 0.0) is members[number]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_hints_are_bounded_and_name_the_last_worker_first(sent: list[tuple[int, int, int]]) -> None:
    hints = Hints(most=50)
    for worker, number, blocks in sent:
        preference = conversation(number, blocks)
        hints.sent(f"w{worker}", preference.chain, None)
        assert len(hints._last) <= 50
        found = hints.of(preference.chain, None)
        assert found[0] == f"w{worker}" and len(found) <= WORKERS_PER_KEY


def test_the_places_of_hints_rise() -> None:
    assert list(PLACES) == sorted(set(PLACES))


@pytest.mark.parametrize("size", [1, 2, MANY])
def test_workers_whose_metrics_ended_while_they_were_full_get_requests_again(size: int) -> None:
    pool, members = made(size)
    full = WorkerFigures(BackendLoad(8, 500, 1.0, 100, 16))
    for member in members:
        member.load.scraped(full, 1.0)
    rig = GateRig(load=pool.load(1.0), now=1.0)
    assert rig.reason() is Reason.MEMORY_PRESSURE
    rig.now = 1.0 + STALE_INTERVALS
    rig.tell(pool.load(rig.now))
    assert rig.reason() is None
    placed(pool, conversation(1, 5), rig.now)
    ours = pool.load(rig.now)
    assert ours is not None and (ours.running, ours.waiting, ours.workers) == (1, 0, size)
