from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from accounting.events import RowsWritten
from admission.values import BackendLoad
from observability.engine_metrics import engine_families
from observability.events import EngineFigures, RequestRecord
from observability.metrics import Metrics
from observability.scrape import ScrapeCollector
from observability.subscribers import EventDispatcher
from resilience.events import AttemptFailed, Retried
from resilience.failures import FailureKind

Make = Callable[..., RequestRecord]

NAMES = {
    "sluice_requests_total", "sluice_request_overhead_seconds", "sluice_ttft_seconds",
    "sluice_time_per_output_token_seconds", "sluice_request_seconds", "sluice_queue_wait_seconds",
    "sluice_generation_seconds", "sluice_tokens_total", "sluice_admission_decisions_total",
    "sluice_fallbacks_total", "sluice_requests_in_flight", "sluice_ledger_rows_total",
    "sluice_ledger_outbox_rows", "sluice_backend_failures_total", "sluice_retries_total",
    "sluice_budget_dropped_total", "sluice_stage_seconds", "sluice_build_info", "sluice_routing_revision",
}  # fmt: skip
ENGINE_NAMES = {
    "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
}  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1.2.3", known_routes=["self_hosted_generation"], known_backends=["local"])


def scraped(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return scraped(metrics).get((name, frozenset(labels.items())))


def test_every_name_is_in_a_scrape_of_a_gateway_that_has_served(metrics: Metrics, record: Make) -> None:
    metrics.registry.register(
        ScrapeCollector(engine_families, lambda: {"local": EngineFigures("demo", BackendLoad())})
    )
    metrics.request(record(fallback_kind="bedrock", fallback_reason="queue_full"))
    EventDispatcher().record(metrics).emit(RowsWritten(3))
    EventDispatcher().record(metrics).emit(
        AttemptFailed("local", FailureKind.CUDA_OOM, 1, False, "OutOfMemoryError")
    )
    families = {
        line.split()[2] for line in metrics.render().decode().splitlines() if line.startswith("# TYPE")
    }
    assert families >= NAMES | ENGINE_NAMES


def test_a_scrape_carries_no_created_series(metrics: Metrics, record: Make) -> None:
    metrics.request(record())
    assert b"_created" not in metrics.render()


def test_few_finished_requests_are_counted_at_once_because_others_wait_meanwhile(record: Make) -> None:
    at_once = []

    class Noting(Metrics):
        def _count(self) -> None:
            at_once.append(len(self._finished))
            super()._count()

    metrics = Noting(version="1.2.3")
    for _ in range(300):
        metrics.request(record())
    assert max(at_once) <= 64
    assert value(metrics, "sluice_tokens_total", kind="output") == 300 * record().output_tokens


def test_a_finished_request_is_counted_by_route_backend_status_and_code(
    metrics: Metrics, record: Make
) -> None:
    metrics.request(record())
    metrics.request(record(status=503, error_code="queue_full", backend_name=None))
    labels = {"route": "self_hosted_generation"}
    assert value(metrics, "sluice_requests_total", backend="local", status="200", code="none", **labels) == 1
    assert (
        value(metrics, "sluice_requests_total", backend="none", status="503", code="queue_full", **labels)
        == 1
    )


@pytest.mark.parametrize("status", [429, 503])
def test_a_refused_try_of_a_batchs_line_is_not_counted_among_requests(
    metrics: Metrics, record: Make, status: int
) -> None:
    """The alert on refused requests called an operator for lines that waited, and would run again."""
    metrics.request(record(status=status, error_code="x", batch_line=True))
    metrics.request(record(batch_line=True))
    names = ("sluice_requests_total", "sluice_tenant_requests_total")
    assert [sum(n for (name, _), n in scraped(metrics).items() if name == one) for one in names] == [1, 1]


def test_times_are_observed_in_seconds(metrics: Metrics, record: Make) -> None:
    metrics.request(record())
    assert value(metrics, "sluice_ttft_seconds_sum") == pytest.approx(0.088)
    assert value(metrics, "sluice_request_seconds_sum") == pytest.approx(0.9124)
    assert value(metrics, "sluice_queue_wait_seconds_sum") == pytest.approx(0.0031)
    assert value(metrics, "sluice_generation_seconds_sum") == pytest.approx(0.9)
    assert value(metrics, "sluice_request_overhead_seconds_sum") == pytest.approx(0.0012)
    assert value(metrics, "sluice_time_per_output_token_seconds_sum") == pytest.approx((0.9124 - 0.088) / 136)
    assert value(metrics, "sluice_stage_seconds_sum", stage="generate") == pytest.approx(0.9)


def test_the_targets_are_bucket_limits_so_that_burn_rates_are_exact(metrics: Metrics) -> None:
    assert value(metrics, "sluice_ttft_seconds_bucket", le="0.2") == 0
    assert value(metrics, "sluice_request_seconds_bucket", le="1.4") == 0


def test_a_refused_request_leaves_the_latency_histograms_alone(metrics: Metrics, record: Make) -> None:
    metrics.request(
        record(status=429, error_code="rate_limited", ttft_ms=None, queue_wait_ms=None, generation_ms=None)
    )
    assert value(metrics, "sluice_request_seconds_count") == 0
    assert value(metrics, "sluice_ttft_seconds_count") == 0
    assert value(metrics, "sluice_queue_wait_seconds_count") == 0


def test_tokens_and_budget_cuts_add_up(metrics: Metrics, record: Make) -> None:
    metrics.request(record())
    metrics.request(record(input_tokens=8, output_tokens=3, cached_tokens=0))
    assert value(metrics, "sluice_tokens_total", kind="input") == 850
    assert value(metrics, "sluice_tokens_total", kind="output") == 140
    assert value(metrics, "sluice_tokens_total", kind="cached") == 640
    assert value(metrics, "sluice_budget_dropped_total", what="chunks") == 2
    assert value(metrics, "sluice_budget_dropped_total", what="turns") == 4
    untouched = {"dropped_chunks": 0, "dropped_turns": 0, "cut_chunks": 0, "summarized_turns": 0}
    metrics.request(record(**untouched))
    assert value(metrics, "sluice_budget_trimmed_requests_total") == 2


def test_what_requests_cost_is_counted_in_dollars_and_without_a_price_not_at_all(
    metrics: Metrics, record: Make
) -> None:
    metrics.request(record())
    here = {"route": "self_hosted_generation", "backend": "local"}
    assert value(metrics, "sluice_cost_usd_total", **here) is None
    for cost_nanousd in (0, 250_000_000, 1_250_000_000):
        metrics.request(record(cost_nanousd=cost_nanousd))
    assert value(metrics, "sluice_cost_usd_total", **here) == pytest.approx(1.5)
    assert value(metrics, "sluice_tenant_cost_usd_total", tenant="shop") == pytest.approx(1.5)


def test_callers_cannot_grow_the_series_with_invented_routes(metrics: Metrics, record: Make) -> None:
    for number in range(5000):
        metrics.request(record(route=f"r{number}", status=404, error_code="unknown_route"))
    metrics.request(record())
    found = [name for name, _ in scraped(metrics) if name == "sluice_requests_total"]
    assert len(found) == 2


def test_figures_of_others_are_read_when_scraped(metrics: Metrics) -> None:
    depth = [3]
    metrics.read(
        sluice_ledger_outbox_rows=lambda: depth[0],
        sluice_routing_revision=lambda: 12,
        sluice_requests_in_flight=lambda: 7,
    )
    depth[0] = 5
    assert value(metrics, "sluice_requests_in_flight") == 7
    assert value(metrics, "sluice_ledger_outbox_rows") == 5
    assert value(metrics, "sluice_routing_revision") == 12


def test_the_engine_is_shown_under_vllms_names_and_labels(metrics: Metrics) -> None:
    figures = EngineFigures(
        "demo", BackendLoad(running=3, waiting=2, kv_usage=0.5, block_size=16, total_blocks=512),
        prefix_queries=1000, prefix_hits=640, preemptions=1,
    )  # fmt: skip
    metrics.registry.register(ScrapeCollector(engine_families, lambda: {"local": figures}))
    labels = {"model_name": "demo", "engine": "0"}
    assert value(metrics, "vllm:num_requests_running", **labels) == 3
    assert value(metrics, "vllm:num_requests_waiting", **labels) == 2
    assert value(metrics, "vllm:kv_cache_usage_perc", **labels) == 0.5
    assert value(metrics, "vllm:prefix_cache_queries_total", **labels) == 1000
    assert value(metrics, "vllm:prefix_cache_hits_total", **labels) == 640
    assert value(metrics, "vllm:num_preemptions_total", **labels) == 1
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="512", **labels) == 1


def test_without_an_engine_there_are_none_of_its_names(metrics: Metrics) -> None:
    metrics.registry.register(ScrapeCollector(engine_families, lambda: {"local": None}))
    assert b"vllm:" not in metrics.render()


def test_two_gateways_in_one_process_do_not_share_figures(metrics: Metrics) -> None:
    EventDispatcher().record(metrics).emit(Retried("local", FailureKind.TIMEOUT))
    assert value(Metrics(version="1"), "sluice_retries_total") == 0
