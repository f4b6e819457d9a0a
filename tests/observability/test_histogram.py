"""The gateway's histogram gives the same scrape as prometheus_client's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference

from observability.histogram import Histogram
from observability.labels import Bounded

BOUNDS = (0.00005, 0.001, 0.5, 1.0, 2.5, 30.0)
values = st.floats(min_value=0, max_value=100) | st.sampled_from(BOUNDS)


def scraped(registry: CollectorRegistry) -> set[bytes]:
    return {line for line in generate_latest(registry).splitlines() if b"_created" not in line}


@given(st.lists(values))
def test_a_scrape_is_the_librarys_byte_for_byte(observed: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("t_seconds", "Time.", BOUNDS, ours)
    reference = Reference("t_seconds", "Time.", buckets=BOUNDS, registry=theirs)
    for value in observed:
        histogram.observe(value)
        reference.observe(value)
    assert scraped(ours) == scraped(theirs)


@given(st.lists(st.tuples(st.sampled_from(["plan", "admit"]), values), min_size=1))
def test_a_labelled_scrape_is_the_librarys_byte_for_byte(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("t_seconds", "Time.", BOUNDS, ours, label="stage")
    reference = Reference("t_seconds", "Time.", ["stage"], buckets=BOUNDS, registry=theirs)
    for stage, value in observed:
        histogram.of(stage).observe(value)
        reference.labels(stage).observe(value)
    assert scraped(ours) == scraped(theirs)


def test_values_beyond_the_labels_bound_share_one_distribution() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "Time.", BOUNDS, registry, label="stage", values=Bounded(["a"], cap=3))
    for stage in ("a", "b", "c", "d"):
        histogram.of(stage).observe(1.0)
    assert registry.get_sample_value("t_seconds_count", {"stage": "other"}) == 3
    assert registry.get_sample_value("t_seconds_count", {"stage": "a"}) == 1


def test_what_is_no_number_is_refused_and_counts_nowhere() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "Time.", BOUNDS, registry)
    with pytest.raises(TypeError):
        histogram.observe(None)  # type: ignore[arg-type]
    assert registry.get_sample_value("t_seconds_count") == 0
    assert math.isclose(registry.get_sample_value("t_seconds_sum") or 0.0, 0.0)
