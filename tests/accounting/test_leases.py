"""Leases of gateways that cannot reach the database are not over at once."""

from dataclasses import dataclass

from accounting.leases import LeaseEnds


@dataclass
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_is_over_when_its_end_has_passed() -> None:
    clock = Clock()
    assert LeaseEnds(15.0, clock, clock).over_before() == 1_000.0


def test_a_lease_that_ends_while_the_database_is_away_has_its_length_to_be_extended_afterwards() -> None:
    clock = Clock()
    leases = LeaseEnds(15.0, clock, clock)
    leases.answered(clock.now)
    for _ in range(12):
        clock.now += 2.0
        leases.query_failed()
    assert leases.over_before() == 985.0, "one that had ended long before is over"
    clock.now += 1.0
    leases.answered(clock.now)
    clock.now += 13.0
    assert leases.over_before() == 985.0
    clock.now += 1.0
    assert leases.over_before() == clock.now


def test_a_lease_that_ends_while_the_database_answers_and_takes_no_writes_is_not_over() -> None:
    clock = Clock()
    leases = LeaseEnds(15.0, clock, clock)
    over = []
    for second in range(60):
        clock.now = 1_000.0 + second
        leases.answered(clock.now)
        if leases.over_before() > 1_010.0:
            over.append(second)
            leases.query_failed()  # the attempt to take over
    assert over == [11, 26, 41, 56]
    assert leases.over_before() < 1_010.0, "its gateway has time to extend it"


def test_a_lease_that_ended_between_two_outages_is_over() -> None:
    clock = Clock()
    leases = LeaseEnds(15.0, clock, clock)
    leases.query_failed()
    clock.now += 60.0
    leases.answered(clock.now)
    leases.query_failed()
    assert leases.over_before() == 1_045.0
