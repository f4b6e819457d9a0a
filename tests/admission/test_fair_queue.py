"""The fair queue: order of service, fair shares, aging, leaving; nothing is lost in any sequence of calls."""

from __future__ import annotations

import weakref
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from admission.fair_queue import CREDIT, MAX_AWAY, SWEEP_FROM, FairQueue, Waiting


def waiting(number: int, tenant: str = "a", rank: int = 0, **more: float | None) -> Waiting:
    given = {"cost": 1000, "uncached": 100, "size_bytes": 10, "arrived_at": 0.0, "leave_at": 100.0, **more}
    return Waiting(number, tenant, rank, **given)  # type: ignore[arg-type]


def line(*items: Waiting, aging_s: float = 0.0) -> FairQueue[Waiting]:
    made: FairQueue[Waiting] = FairQueue(aging_s=aging_s)
    for item in items:
        made.join(item)
    return made


def served(made: FairQueue[Waiting], count: int = 10_000) -> list[Waiting]:
    out = []
    while len(out) < count and (item := made.peek()) is not None:
        made.serve(item)
        out.append(item)
    return out


def test_the_higher_class_is_served_first_and_within_it_the_earlier() -> None:
    made = line(waiting(1, rank=-1), waiting(2), waiting(3, rank=1), waiting(4))
    assert [item.number for item in served(made)] == [3, 2, 4, 1]


def test_among_equals_the_earliest_deadline_goes_first_and_none_goes_last() -> None:
    made = line(waiting(1), waiting(2, deadline=9.0), waiting(3, deadline=5.0))
    assert [item.number for item in served(made)] == [3, 2, 1]


def test_a_tenant_with_long_prompts_gets_as_many_tokens_as_one_with_short_prompts() -> None:
    made = line(
        *(waiting(n, "long", cost=4000) for n in range(100)),
        *(waiting(100 + n, "short", cost=500) for n in range(1000)),
    )
    tokens = Counter[str]()
    for item in served(made, 450):
        tokens[item.tenant] += item.cost
    assert abs(tokens["long"] - tokens["short"]) <= 4000


def test_a_flood_of_one_tenant_delays_another_by_no_more_than_a_turn() -> None:
    made = line(*(waiting(n, "flood") for n in range(1000)), waiting(2000, "quiet"))
    order = [item.tenant for item in served(made)]
    assert order.index("quiet") <= 1


def test_a_tenant_that_asks_seldom_goes_first_but_saves_only_a_bounded_credit() -> None:
    made = line(*(waiting(n, "busy") for n in range(200)))
    served(made, 100)
    for number in range(1000, 1060):
        made.join(waiting(number, "seldom"))
    order = [item.tenant for item in served(made, 60)]
    head = order.index("busy")
    assert head == CREDIT // 1000 + 1
    assert abs(order[head:].count("busy") - order[head:].count("seldom")) <= 1


def test_only_so_many_absent_tenants_are_remembered() -> None:
    made = line()
    for number in range(3 * MAX_AWAY):
        made.join(waiting(number, f"t{number}", cost=10 * CREDIT))
        served(made)
    assert len(made._classes[0]._away) <= MAX_AWAY


def test_asking_who_is_next_changes_nothing() -> None:
    made = line(*(waiting(n, tenant) for n, tenant in enumerate("abcabc")))
    assert made.peek() is made.peek() is made.peek()


def test_waiting_raises_a_request_class_by_class_so_that_none_starves() -> None:
    low = waiting(0, "low", rank=-1)
    made = line(low, aging_s=10.0)
    number, now = 0, 0.0
    while made.peek() is not None and low.entry:
        number += 1
        now += 1.0
        made.join(waiting(number, "high", rank=1, arrived_at=now, leave_at=now + 1000))
        made.age(now)
        item = made.peek()
        assert item is not None
        made.serve(item)
        assert now < 60.0, "starved"
    assert low.rank == 1


def test_only_requests_whose_time_is_up_leave() -> None:
    made = line(waiting(1, leave_at=1.0), waiting(2, leave_at=3.0), waiting(3, leave_at=2.0))
    assert made.next_change() == 1.0
    assert [item.number for item in made.expired(2.0)] == [1, 3]
    assert (len(made.waiting), made.next_change()) == (1, 3.0)


def test_the_first_request_to_displace_is_the_newest_of_the_lowest_class() -> None:
    made = line(waiting(1, rank=-1), waiting(2, rank=-1), waiting(3), waiting(4, rank=1))
    least = made.least()
    assert least is not None and least.number == 2


def test_how_many_are_ahead_counts_higher_classes_and_fair_turns() -> None:
    made = line(
        *(waiting(n, "flood") for n in range(50)),
        *(waiting(100 + n, "vip", rank=1) for n in range(3)),
    )
    assert made.ahead_of("flood", 0) == 53
    assert made.ahead_of("quiet", 0) == 3 + 1
    assert made.ahead_of("quiet", 1) == 1


def test_memory_grows_with_waiting_requests_not_with_those_that_left() -> None:
    made = line(waiting(0, leave_at=1e9, deadline=0.0), aging_s=10.0)
    for number in range(1, 20_000):
        item = waiting(number, leave_at=1e6 + number, deadline=1e6 + number)
        made.join(item)
        made.leave(item)
    kept = len(made._leaving) + len(made._aging) + len(made._classes[0].tenants["a"].heap)
    assert kept <= 3 * (SWEEP_FROM + 4)


class Watched(Waiting, weakref=True):
    """Tells whether it is still in memory."""


def test_a_request_that_has_left_is_not_kept_in_memory() -> None:
    made = line(waiting(0, leave_at=1.0, deadline=1.0), aging_s=10.0)
    left = []
    for number, leave in enumerate((made.leave, made.serve), 1):
        item = Watched(number, "a", 0, 1000, 100, 10, 0.0, 100.0, 50.0)
        made.join(item)
        leave(item)
        left.append(weakref.ref(item))
    del item, leave
    assert made.next_change() == 1.0  # the first request still waits
    assert [one() for one in left] == [None, None]


@given(
    flood=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 1)), min_size=1, max_size=6),
    rank=st.integers(-1, 1),
    tenant=st.sampled_from("ade"),
)
def test_whatever_floods_the_line_each_request_is_served_within_a_bound(
    flood: list[tuple[str, int]], rank: int, tenant: str
) -> None:
    """One request a second. The bound: two classes of aging, the requests before it, a turn of each tenant."""
    made, number, backlog = line(aging_s=10.0), 0, 40
    for _ in range(backlog):
        number += 1
        made.join(waiting(number, tenant=flood[number % len(flood)][0], rank=1, leave_at=1e9))
    seen = waiting(0, tenant=tenant, rank=rank, leave_at=1e9)
    made.join(seen)
    for second in range(400):
        for name, urgency in flood[:2]:  # up to two arrive a second, one is served
            number += 1
            made.join(waiting(number, tenant=name, rank=urgency, arrived_at=float(second), leave_at=1e9))
        made.age(float(second))
        item = made.peek()
        assert item is not None
        made.serve(item)
        if item is seen:
            return
    raise AssertionError("it starved")


class AnySequence(RuleBasedStateMachine):
    """A fair queue under joins, leaves, serves, aging and expiry in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.line: FairQueue[Waiting] = FairQueue(aging_s=5.0)
        self.inside: dict[int, Waiting] = {}
        self.now = 0.0
        self.number = 0

    @rule(
        tenant=st.sampled_from("abc"),
        rank=st.integers(-2, 2),
        cost=st.integers(1, 20_000),
        stay=st.floats(0.1, 30.0),
        deadline=st.none() | st.floats(0.0, 50.0),
    )
    def join(self, tenant: str, rank: int, cost: int, stay: float, deadline: float | None) -> None:
        self.number += 1
        item = Waiting(self.number, tenant, rank, cost, 7, 3, self.now, self.now + stay, deadline)
        self.line.join(item)
        self.inside[item.number] = item

    @rule()
    def serve(self) -> None:
        item = self.line.peek()
        assert (item is None) == (not self.inside), "work is conserved: somebody is next while anybody waits"
        if item is not None:
            assert item.rank == max(one.rank for one in self.inside.values())
            self.line.serve(item)
            del self.inside[item.number]

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.inside:
            item = self.inside.pop(data.draw(st.sampled_from(sorted(self.inside))))
            self.line.leave(item)

    @rule(passed=st.floats(0.0, 20.0))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        gone = {item.number for item in self.line.expired(self.now)}
        assert gone == {n for n, item in self.inside.items() if item.leave_at <= self.now}
        for number in gone:
            del self.inside[number]
        self.line.age(self.now)

    @invariant()
    def the_books_agree(self) -> None:
        assert len(self.line.waiting) == len(self.inside)
        assert self.line.waiting == self.inside
        assert self.line.tokens == 7 * len(self.inside)
        assert self.line.size_bytes == 3 * len(self.inside)
        assert sum(self.line.counts().values()) == len(self.inside)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
