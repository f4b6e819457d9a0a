from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from observability.labels import NONE, OTHER, Bounded, Series


def test_absent_values_are_none() -> None:
    bounded = Bounded()
    assert (bounded(None), bounded("")) == (NONE, NONE)


def test_values_beyond_the_cap_are_other_and_earlier_ones_keep_their_name() -> None:
    bounded = Bounded(cap=4)  # two values besides "none" and "other"
    assert [bounded(name) for name in "abcab"] == ["a", "b", OTHER, "a", "b"]


def test_known_values_have_their_place_after_any_flood() -> None:
    bounded = Bounded(["configured"], cap=5)
    for number in range(1000):
        bounded(f"junk-{number}")
    assert bounded("configured") == "configured"


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=200), st.integers(2, 20))
def test_no_input_makes_more_values_than_the_cap(values: list[str | None], cap: int) -> None:
    bounded = Bounded(cap=cap)
    assert len({bounded(value) for value in values}) <= cap


@given(st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2)), max_size=200))
def test_no_input_makes_more_series_than_the_cap_and_nothing_goes_uncounted(
    pairs: list[tuple[str, str]],
) -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "c", ["a", "b"], registry=registry)
    series = Series(counter, Bounded(), Bounded(), cap=10)
    for pair in pairs:
        series(*pair).inc()
    samples = [
        sample for family in registry.collect() for sample in family.samples if sample.name == "c_total"
    ]
    assert len(samples) <= 11  # the cap, and one series for the rest
    assert sum(sample.value for sample in samples) == len(pairs)


def test_a_child_is_looked_up_once() -> None:
    series = Series(Counter("c", "c", ["a"], registry=CollectorRegistry()), Bounded())
    assert series("x") is series("x")
