"""The number of series is bounded for any number of tenants, adapters and routes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observability.events import RequestRecord
from observability.histogram import LabelCounter
from observability.labels import MAX_VALUES, OTHER, Bounded
from observability.metrics import Metrics
from observability.slo_metrics import SloTargets

Make = Callable[..., RequestRecord]


def parsed(metrics: Metrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.render().decode()))


def values(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """A metric's sums by one label."""
    return summed(parsed(metrics), name, label)


def summed(families: list[Metric], name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == name:
                sums[sample.labels[label]] = sums.get(sample.labels[label], 0.0) + sample.value
    return sums


def test_tenants_adapters_and_routes_beyond_the_bound_are_other_and_nothing_is_lost(record: Make) -> None:
    metrics = Metrics(version="1")
    everyone = {f"route{n}": SloTargets(200, 1400) for n in range(3 * MAX_VALUES)}
    metrics.slo.targets = lambda: everyone
    for n in range(3 * MAX_VALUES):
        metrics.request(
            record(tenant=f"tenant{n}", adapter_id=f"adapter{n}", route=f"route{n}", input_tokens=10,
                   output_tokens=0, cached_tokens=0, backend_version=f"weights{n}", fallback_kind=f"leg{n}",
                   fallback_reason="queue_full", prompt_version=f"version{n}", prefix_tokens=16, cost_nanousd=1_000)
        )  # fmt: skip
    families = parsed(metrics)  # parsed once, because it takes 0.2 s
    for name, label in (
        ("sluice_tenant_requests_total", "tenant"),
        ("sluice_tenant_tokens_total", "tenant"),
        ("sluice_adapter_tokens_total", "adapter"),
        ("sluice_cost_usd_total", "route"),
        ("sluice_tenant_cost_usd_total", "tenant"),
        ("sluice_slo_requests_total", "route"),
        ("sluice_requests_total", "route"),
        ("sluice_answers_total", "backend_version"),
        ("sluice_fallbacks_total", "kind"),
        ("sluice_prompt_prefix_tokens_total", "prompt_version"),
    ):
        found = summed(families, name, label)
        assert len(found) <= MAX_VALUES + 1, name
        assert found[OTHER] > 0, name
    assert sum(summed(families, "sluice_tenant_requests_total", "tenant").values()) == 3 * MAX_VALUES
    assert sum(summed(families, "sluice_adapter_tokens_total", "adapter").values()) == 30 * MAX_VALUES
    assert sum(summed(families, "sluice_requests_total", "route").values()) == 3 * MAX_VALUES


def test_the_outcomes_of_a_tenants_requests_are_counted_separately(record: Make) -> None:
    metrics = Metrics(version="1")
    metrics.request(record())
    metrics.request(record(fallback_kind="bedrock", fallback_reason="queue_full"))
    metrics.request(record(status=429, error_code="rate_limited"))
    metrics.request(record(status=503, error_code="queue_full"))
    metrics.request(record(error_code="stream_broken"))
    metrics.request(record(status=499, error_code="cancelled"))
    assert values(metrics, "sluice_tenant_requests_total", "outcome") == {
        "answered": 1, "fallback": 1, "refused": 1, "failed": 2, "left": 1,
    }  # fmt: skip


def test_what_the_budget_shortened_is_counted(record: Make) -> None:
    metrics = Metrics(version="1")
    metrics.request(record(cut_chunks=1, merged_chunks=2, summarized_turns=3))
    assert values(metrics, "sluice_budget_shortened_total", "what") == {
        "cut_chunks": 1, "merged_chunks": 2, "summarized_turns": 3,
    }  # fmt: skip


def test_rare_events_have_their_series_before_the_first_one() -> None:
    metrics = Metrics(version="1", known_backends=["local"])
    assert values(metrics, "sluice_oom_contained_total", "layer") == {"containment": 0.0, "recovery": 0.0}
    assert values(metrics, "sluice_admitted_load_factor", "backend") == {"local": 1.0}
    assert set(values(metrics, "sluice_admission_decisions_total", "decision")) == {"admitted", "refused"}


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 2), st.integers(0, 1000))))
def test_a_label_counter_loses_nothing(events: list[tuple[str, int, int]]) -> None:
    registry = CollectorRegistry()
    tally = LabelCounter("x", "x", "who", "kind", ("a", "b", "c"), Bounded(cap=4), registry)
    for who, kind, count in events:
        tally.of(who)[kind] += count
    found = {"a": 0.0, "b": 0.0, "c": 0.0}
    names = set()
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name == "x_total":
                found[sample.labels["kind"]] += sample.value
                names.add(sample.labels["who"])
    assert list(found.values()) == [sum(c for _, k, c in events if k == kind) for kind in range(3)]
    assert len(names) <= 5
