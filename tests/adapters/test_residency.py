"""Residency: demanded and pinned adapters stay, used ones are never evicted, broken ones wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapters.residency import LONGEST_WAIT_S, AdapterDemand, Broken, Full, LoadDecision, Residency

NAMES = "abcdef"


def loaded(residency: Residency, *names: str, now: float = 0.0) -> None:
    for name in names:
        residency.loaded(name, f"folder/{name}", now)


def used(residency: Residency, name: str, times: int, now: float) -> None:
    for _ in range(times):
        residency.enter(name, now)
        residency.leave(name, now)


def test_a_loaded_adapter_is_ready_and_other_weights_under_its_name_are_not() -> None:
    residency = Residency(2)
    loaded(residency, "a")
    assert residency.decide("a", "folder/a", {"a"}, 0.0) is None
    assert residency.decide("a", "folder/a2", {"a"}, 0.0) == LoadDecision()


def test_the_least_demanded_adapter_is_evicted_and_of_equal_ones_the_longest_idle() -> None:
    residency = Residency(2)
    loaded(residency, "a", "b")
    used(residency, "a", 3, now=1.0)
    used(residency, "b", 1, now=2.0)
    assert residency.decide("c", "folder/c", {"a", "b"}, 3.0) == LoadDecision("b")
    equal = Residency(2)
    loaded(equal, "x", "y")
    used(equal, "y", 1, now=1.0)
    used(equal, "x", 1, now=1.0)
    equal.enter("x", 5.0)
    equal.leave("x", 5.0)
    equal.enter("y", 5.0)
    equal.leave("y", 6.0)
    assert equal.victim({"x", "y"}, 6.0) == "x"


def test_demand_decays_so_that_an_old_favourite_is_evicted() -> None:
    residency = Residency(2, AdapterDemand(half_life_s=10.0))
    loaded(residency, "old", "new")
    used(residency, "old", 100, now=0.0)
    used(residency, "new", 2, now=100.0)
    assert residency.victim({"old", "new"}, 100.0) == "old"


def test_an_adapter_in_use_or_pinned_is_never_evicted_and_the_decision_is_full() -> None:
    residency = Residency(2)
    loaded(residency, "a", "b")
    residency.enter("a", 0.0)
    residency.pin(["b"])
    assert residency.decide("c", "folder/c", {"a", "b"}, 0.0) == Full(pinned=1)
    residency.leave("a", 1.0)
    assert residency.decide("c", "folder/c", {"a", "b"}, 1.0) == LoadDecision("a")


def test_an_adapter_left_by_a_cancelled_load_is_evicted_first() -> None:
    residency = Residency(2)
    loaded(residency, "a")
    assert residency.decide("c", "folder/c", {"a", "orphan"}, 0.0) == LoadDecision("orphan")


def test_a_broken_adapter_waits_longer_each_time_and_at_most_a_minute() -> None:
    residency, now, waits = Residency(2), 0.0, []
    for _ in range(9):
        waits.append(residency.failed("a", "no such folder", now))
        refused = residency.decide("a", "folder/a", set(), now + waits[-1] / 2)
        assert refused == Broken("no such folder", pytest.approx(waits[-1] / 2))
        now += waits[-1]
        assert residency.decide("a", "folder/a", set(), now) == LoadDecision()
    assert waits[:3] == [1.0, 2.0, 4.0] and waits[-1] == LONGEST_WAIT_S
    loaded(residency, "a", now=now)
    residency.unloaded("a")
    assert residency.failed("a", "again", now) == 1.0


def test_pinned_ones_are_wanted_first_then_the_hottest_that_are_known() -> None:
    residency = Residency(3)
    for name, times in (("a", 1), ("b", 5), ("c", 3), ("gone", 9)):
        used(residency, name, times, now=0.0)
    residency.pin(["p"])
    assert residency.wanted(["a", "b", "c", "p"], 1.0) == ("p", "b", "c")
    assert residency.next_load(["a", "b", "c", "p"], set(), 1.0) == "p"
    loaded(residency, "p", "b")
    assert residency.next_load(["a", "b", "c", "p"], {"p", "b"}, 1.0) == "c"
    loaded(residency, "c")
    assert residency.next_load(["a", "b", "c", "p"], {"p", "b", "c"}, 1.0) is None


def test_a_pinned_one_makes_room_for_itself_and_a_merely_hot_one_does_not() -> None:
    residency = Residency(1)
    loaded(residency, "a")
    used(residency, "hot", 50, now=0.0)
    assert residency.next_load(["a", "hot"], {"a"}, 0.0) is None
    residency.pin(["p"])
    assert residency.next_load(["a", "p"], {"a"}, 0.0) == "p"


def test_heat_is_kept_over_a_restart_and_has_faded_meanwhile() -> None:
    heat = AdapterDemand(half_life_s=60.0)
    for _ in range(8):
        heat.touch("a", 0.0)
    heat.touch("b", 0.0)
    later = AdapterDemand(half_life_s=60.0)
    later.restore(heat.snapshot(0.0), 1_000.0, age_s=120.0)
    assert later.of("a", 1_000.0) == pytest.approx(2.0)
    assert later.most_demanded(["a", "b", "c"], 1_000.0) == ["a", "b"]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 100)), max_size=50))
def test_heat_is_never_more_than_the_requests_there_were(touches: list[tuple[str, float]]) -> None:
    heat, now = AdapterDemand(10.0), 0.0
    for name, wait in touches:
        now += wait
        heat.touch(name, now)
    for name in NAMES:
        count = sum(one == name for one, _ in touches)
        assert 0 <= heat.of(name, now) <= count + 1e-9


class Engine(RuleBasedStateMachine):
    """An engine with three slots that follows residency's decisions; callers come, go and leave early."""

    @initialize()
    def begin(self) -> None:
        self.residency = Residency(3, AdapterDemand(5.0))
        self.held: dict[str, str] = {}
        self.users: list[str] = []
        self.pinned: frozenset[str] = frozenset()
        self.now = 0.0

    @rule(name=st.sampled_from(NAMES), works=st.booleans(), leaves=st.booleans())
    def request(self, name: str, works: bool, leaves: bool) -> None:
        folder = f"folder/{name}"
        self.residency.enter(name, self.now)
        decision = self.residency.decide(name, folder, self.held, self.now)
        if isinstance(decision, LoadDecision):
            if decision.evict is not None:
                assert decision.evict in self.held
                assert decision.evict not in self.users and decision.evict not in self.pinned
                self.residency.unloaded(decision.evict)
                del self.held[decision.evict]
            if leaves:
                self.held[name] = folder  # the load continues without its caller
                self.residency.leave(name, self.now)
                return
            if not works:
                self.residency.failed(name, "broken", self.now)
                self.residency.leave(name, self.now)
                return
            self.held[name] = folder
            self.residency.loaded(name, folder, self.now)
        elif decision is not None:
            self.residency.leave(name, self.now)
            return
        self.users.append(name)

    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        if self.users:
            self.residency.leave(self.users.pop(index % len(self.users)), self.now)

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=2))
    def pin(self, names: set[str]) -> None:
        self.pinned = frozenset(names)
        self.residency.pin(names)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def never_more_than_the_places_and_whoever_uses_one_has_it(self) -> None:
        if hasattr(self, "residency"):
            self.residency.check_integrity()
            assert len(self.held) <= 3
            assert set(self.users) <= self.held.keys()
            assert set(self.residency.resident) <= self.held.keys()
            assert set(self.residency.in_use) == set(self.users)


TestEngine = Engine.TestCase
