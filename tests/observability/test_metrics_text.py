"""Samples are read by name from Prometheus' text format."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from observability.metrics_text import samples_of, total_of

REGISTRY = CollectorRegistry()
for _name, _value in (('a "quoted" one\\', 2), ("b,c}", 3)):
    Counter(f"asked_{_value}", "x", registry=REGISTRY).inc()
    Gauge("depth" if _value == 2 else "depth_of_others", "x", ["queue"], registry=REGISTRY).labels(_name).set(
        _value
    )
PAGE = generate_latest(REGISTRY).decode()


def test_a_name_is_read_with_its_labels_and_not_by_its_beginning() -> None:
    [depth] = samples_of(PAGE, "depth")
    assert (depth.labels, depth.value) == ({"queue": 'a "quoted" one\\'}, 2.0)
    assert [one.value for one in samples_of(PAGE, "depth", "depth_of_others")] == [2.0, 3.0]
    assert total_of(PAGE, "asked_2_total") == 1.0 and total_of(PAGE, "nothing") == 0.0


@given(st.text('{}",=\\ #0123456789.eE+-NaInf_:'))
def test_malformed_lines_are_skipped(rest: str) -> None:
    assert [one.value for one in samples_of(f"depth{rest}\nother 3\n", "other")] == [3.0]
    list(samples_of(f"depth{rest}\n", "depth"))
