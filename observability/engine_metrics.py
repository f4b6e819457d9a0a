"""Metrics of the engines in process, read when scraped: under vLLM's names, and as ``sluice_engine_*``."""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from observability.events import EngineFigures
from observability.scrape import counter, gauge

LABELS = ("model_name", "engine")


def engine_families(
    figures: Mapping[str, EngineFigures | None], unix_time: Callable[[], float] = time.time
) -> Iterator[Metric]:
    """Families of the engines in process, by backend, under the names of vLLM that fleet routers read.

    ``unix_time`` gives the value of ``vllm:lora_requests_info``: readers use its newest series.
    """
    families: dict[str, Metric] = {}
    for backend, one in figures.items():
        for family in () if one is None else _families(backend, one, unix_time):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family
    yield from families.values()


def _families(backend: str, figures: EngineFigures, unix_time: Callable[[], float]) -> Iterator[Metric]:
    yield from _gateway_names(backend, figures)
    engine = (figures.model_name, "0")
    for name, text, value in (
        ("vllm:num_requests_running", "Sequences in the engine's batch.", figures.running),
        ("vllm:num_requests_waiting", "Sequences in the engine's queue.", figures.waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", figures.kv_usage),
    ):
        yield gauge(name, text, {engine: value}, *LABELS)
    for name, text, total in (
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            figures.prefix_queries,
        ),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", figures.prefix_hits),
        ("vllm:num_preemptions", "Sequences preempted.", figures.preemptions),
        ("vllm:prompt_tokens", "Prompt tokens computed or found.", figures.prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", figures.generation_tokens),
    ):
        if total is not None:
            yield counter(name, text, {engine: total}, *LABELS)
    yield gauge(
        "vllm:cache_config_info",
        "The KV cache's shape.",
        {(*engine, str(figures.block_size), str(figures.total_blocks)): 1},
        *LABELS, "block_size", "num_gpu_blocks",
    )  # fmt: skip
    for shown in figures.distributions:
        histogram = HistogramMetricFamily(shown.name, shown.text, labels=LABELS)
        edges = [*map(floatToGoString, shown.bounds), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(shown.counts)), strict=True))
        histogram.add_metric(engine, buckets, shown.total)
        yield histogram
    if figures.loras is not None:
        names = (",".join(figures.loras.running), ",".join(figures.loras.waiting))
        yield gauge(
            "vllm:lora_requests_info",
            "Adapters of the requests; the value is the time of this reading.",
            {(str(figures.loras.max_loras), *names): unix_time()},
            "max_lora", "running_lora_adapters", "waiting_lora_adapters",
        )  # fmt: skip


def _gateway_names(backend: str, figures: EngineFigures) -> Iterator[Metric]:
    """The same figures under the gateway's names, like those of remote workers (``sluice_worker_*``)."""
    for name, text, value in (
        ("sluice_engine_running", "Sequences in the batch of an engine in process.", figures.running),
        ("sluice_engine_waiting", "Sequences in the queue of an engine in process.", figures.waiting),
        ("sluice_engine_kv_usage", "Share of the engine's KV blocks in use, 0 to 1.", figures.kv_usage),
    ):
        yield gauge(name, text, {backend: value}, "backend")
    for name, text, total in (
        (
            "sluice_engine_prefix_queries",
            "Prompt tokens looked up in the prefix cache.",
            figures.prefix_queries,
        ),
        ("sluice_engine_prefix_hits", "Prompt tokens found in the prefix cache.", figures.prefix_hits),
        ("sluice_engine_preemptions", "Sequences preempted.", figures.preemptions),
    ):
        yield counter(name, text, {backend: total}, "backend")
