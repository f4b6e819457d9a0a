"""The engine in process in the metrics, read when scraped: under vLLM's names and ``sluice_engine_*``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from observability.events import EngineFigures


class EngineCollector(Collector):
    """The engine in process under vLLM's names, read when scraped, so that fleet routers find what they know.

    Args:
        read: the figures now, or ``None`` while there is no engine; must neither block nor raise.
        unix_time: seconds since 1970; the value of ``vllm:lora_requests_info``, of whose series readers take
            the newest.
    """

    def __init__(
        self, read: Callable[[], EngineFigures | None], unix_time: Callable[[], float] = time.time
    ) -> None:
        self._read = read
        self._unix_time = unix_time

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        figures = self._read()
        if figures is None:
            return
        labels, values = ["model_name", "engine"], [figures.model_name, "0"]
        gauges: tuple[tuple[str, str, float], ...] = (
            ("vllm:num_requests_running", "Sequences in the engine's batch.", figures.running),
            ("vllm:num_requests_waiting", "Sequences in the engine's queue.", figures.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", figures.kv_usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        yield from _own_names(figures)
        counters: tuple[tuple[str, str, float], ...] = (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                figures.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", figures.prefix_hits),
            ("vllm:num_preemptions", "Sequences pushed out of the batch.", figures.preemptions),
        )
        if figures.prompt_tokens is not None:
            counters += (("vllm:prompt_tokens", "Prompt tokens computed or found.", figures.prompt_tokens),)
        if figures.generation_tokens is not None:
            counters += (("vllm:generation_tokens", "Tokens generated.", figures.generation_tokens),)
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, value)
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's shape.",
            labels=[*labels, "block_size", "num_gpu_blocks"],
        )
        info.add_metric([*values, str(figures.block_size), str(figures.total_blocks)], 1)
        yield info
        for kept in figures.distributions:
            histogram = HistogramMetricFamily(kept.name, kept.text, labels=labels)
            edges = [*map(floatToGoString, kept.bounds), "+Inf"]
            histogram.add_metric(
                values, list(zip(edges, map(float, accumulate(kept.counts)), strict=True)), kept.total
            )
            yield histogram
        if figures.loras is not None:
            loras = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Adapters of the requests; the value is the time of this reading.",
                labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            )
            names = [",".join(figures.loras.running), ",".join(figures.loras.waiting)]
            loras.add_metric([str(figures.loras.max_loras), *names], self._unix_time())
            yield loras


def _own_names(figures: EngineFigures) -> Iterator[Metric]:
    """The same under the gateway's names, beside those of remote workers (``sluice_worker_*``)."""
    gauges: tuple[tuple[str, str, float], ...] = (
        ("sluice_engine_running", "Sequences in the batch of the engine in process.", figures.running),
        ("sluice_engine_waiting", "Sequences in its queue.", figures.waiting),
        ("sluice_engine_kv_usage", "Share of its KV blocks in use, 0 to 1.", figures.kv_usage),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(name, text, value=value)
    counters: tuple[tuple[str, str, float], ...] = (
        ("sluice_engine_prefix_queries", "Prompt tokens looked up in its cache.", figures.prefix_queries),
        ("sluice_engine_prefix_hits", "Prompt tokens found in its cache.", figures.prefix_hits),
        ("sluice_engine_preemptions", "Sequences pushed out of its batch.", figures.preemptions),
    )
    for name, text, value in counters:
        yield CounterMetricFamily(name, text, value=value)
