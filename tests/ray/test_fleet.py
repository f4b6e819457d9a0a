"""The choice of an engine replica: the same replica for the same prefix, at a cost that does not grow."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.backends.workers.pool import DRAWN, MAX_SNAPSHOT_AGE_S, NEAR, WHOLE_UP_TO
from gateway.backends.workers.shortlist import WORKERS_PER_KEY
from gateway.backends.workers.worker_choice import CACHED_FACTOR, WorkerChoice, WorkerPreference, WorkerView
from ops.ray.fleet import ReplicaFleet


class Replicas:
    """Replicas with a load each; ``looks`` counts how often a replica is read."""

    def __init__(self, count: int, seed: int = 1, whole_up_to: int = WHOLE_UP_TO) -> None:
        self.requests = {f"replica-{number}": 0.0 for number in range(count)}
        self.away: set[str] = set()
        self.looks = 0
        self.now = 0.0
        self.fleet = ReplicaFleet(
            WorkerChoice(()),
            view=self.view,
            clock=lambda: self.now,
            random=random.Random(seed),
            whole_up_to=whole_up_to,
        )
        self.fleet.resize(list(self.requests))

    def view(self, name: str) -> WorkerView | None:
        self.looks += 1
        return None if name in self.away else WorkerView(name, self.requests[name])

    def call(self, preference: WorkerPreference) -> str:
        """Place a call, send it to the replica and return the replica's name."""
        best = self.fleet.place(preference, ()).best
        assert best is not None
        self.fleet.sent(best, preference)
        self.requests[best] += 1
        return best


def preference_of(conversation: int, turn: int = 0) -> WorkerPreference:
    return WorkerPreference(tuple(1_000 * conversation + block for block in range(1, 9 + 2 * turn)), 2)


def test_a_few_replicas_are_all_looked_at() -> None:
    replicas = Replicas(WHOLE_UP_TO)
    placed = replicas.fleet.place(preference_of(1), ("replica-3",))
    assert placed.whole
    assert {placed.best, *placed.others} == set(replicas.requests) - {"replica-3"}


@pytest.mark.slow
def test_of_many_replicas_a_call_reads_a_few_and_only_four_times_a_second_all() -> None:
    replicas = Replicas(1_000)
    replicas.call(preference_of(0))
    replicas.looks = 0
    for number in range(1, 101):
        replicas.call(preference_of(number))
    assert replicas.looks <= 100 * (WORKERS_PER_KEY + NEAR + DRAWN)
    replicas.now += MAX_SNAPSHOT_AGE_S
    replicas.looks = 0
    replicas.call(preference_of(0))
    assert replicas.looks >= 1_000


def test_a_conversation_stays_on_its_replica_among_many() -> None:
    replicas = Replicas(500)
    first = [replicas.call(preference_of(number)) for number in range(200)]
    replicas.requests = dict.fromkeys(replicas.requests, 0.0)
    replicas.now += MAX_SNAPSHOT_AGE_S
    assert [replicas.call(preference_of(number, turn=1)) for number in range(200)] == first, (
        "its cache is there"
    )


def test_a_popular_prefix_spreads_over_as_many_replicas_as_its_load_needs() -> None:
    replicas = Replicas(64)
    calls = Counter(replicas.call(preference_of(7)) for _ in range(640))
    assert max(calls.values()) <= (1.25 + CACHED_FACTOR) * 640 / 64 + 1


def test_when_no_replica_of_the_shortlist_serves_all_are_read() -> None:
    replicas = Replicas(200)
    replicas.away = set(replicas.requests) - {"replica-42"}
    placed = replicas.fleet.place(preference_of(1), ())
    assert (placed.best, placed.others, placed.whole) == ("replica-42", (), True)
    replicas.away.add("replica-42")
    assert replicas.fleet.place(preference_of(1), ()).best is None


def test_a_second_attempt_names_every_replica_that_serves() -> None:
    replicas = Replicas(100)
    assert not replicas.fleet.place(preference_of(1), ()).whole
    placed = replicas.fleet.place(preference_of(1), ("replica-1",), whole=True)
    assert {placed.best, *placed.others} == set(replicas.requests) - {"replica-1"}


def test_a_replica_that_has_gone_is_neither_chosen_nor_remembered() -> None:
    replicas = Replicas(100)
    gone = replicas.call(preference_of(1))
    replicas.fleet.resize([name for name in replicas.requests if name != gone])
    replicas.fleet.sent(gone, preference_of(1))
    assert replicas.call(preference_of(1, turn=1)) != gone


@settings(max_examples=30)
@given(
    count=st.integers(1, 80),
    away=st.sets(st.integers(0, 79)),
    avoid=st.sets(st.integers(0, 79)),
    conversations=st.lists(st.integers(0, 5), max_size=20),
)
def test_a_replica_that_serves_and_did_not_fail_the_call_is_found(
    count: int, away: set[int], avoid: set[int], conversations: list[int]
) -> None:
    replicas = Replicas(count, whole_up_to=8)
    for number in conversations:
        replicas.call(preference_of(number))
    replicas.away = {f"replica-{number}" for number in away}
    avoided = {f"replica-{number}" for number in avoid}
    free = set(replicas.requests) - replicas.away - avoided
    placed = replicas.fleet.place(preference_of(1), avoided)
    assert (placed.best in free) if free else placed.best is None
    assert set(placed.others) <= free - {placed.best}


@pytest.mark.parametrize("count", [2, 33, 1_000])
def test_calls_without_a_preferred_replica_go_to_the_least_loaded_one(count: int) -> None:
    replicas = Replicas(count)
    replicas.requests = {name: float(number) for number, name in enumerate(replicas.requests)}
    for _ in range(20):
        placed = replicas.fleet.place(WorkerPreference(), ())
        assert placed.best is not None
        assert placed.best == min((placed.best, *placed.others), key=replicas.requests.__getitem__)
