"""Metrics of the engines in process, read when scraped: under vLLM's names, and as ``sluice_engine_*``."""

import time
from collections.abc import Iterator, Mapping
from operator import attrgetter

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from observability.events import EngineFigures
from observability.histogram import cumulative
from observability.scrape import counter, gauge

LABELS = ("model_name", "engine")
# Kind, name, help and field of the figures that are one number.
NUMBERS = (
    (gauge, "sluice_engine_running", "Sequences in the batch of an engine in process.", "load.running"),
    (gauge, "sluice_engine_waiting", "Sequences in the queue of an engine in process.", "load.waiting"),
    (gauge, "sluice_engine_kv_usage", "Share of the engine's KV blocks in use, 0 to 1.", "load.kv_usage"),
    (
        counter,
        "sluice_engine_prefix_queries",
        "Prompt tokens looked up in the prefix cache.",
        "prefix_queries",
    ),
    (counter, "sluice_engine_prefix_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    (counter, "sluice_engine_preemptions", "Sequences preempted.", "preemptions"),
    (gauge, "vllm:num_requests_running", "Sequences in the engine's batch.", "load.running"),
    (gauge, "vllm:num_requests_waiting", "Sequences in the engine's queue.", "load.waiting"),
    (gauge, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "load.kv_usage"),
    (counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    (counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    (counter, "vllm:num_preemptions", "Sequences preempted.", "preemptions"),
    (counter, "vllm:prompt_tokens", "Prompt tokens computed or found.", "prompt_tokens"),
    (counter, "vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
)


def engine_families(figures: Mapping[str, EngineFigures | None]) -> Iterator[Metric]:
    """Families of the engines in process, by backend: under the names of vLLM that fleet routers read, and
    under the gateway's names, like those of remote workers (``sluice_worker_*``).
    """
    families: dict[str, Metric] = {}
    for backend, one in figures.items():
        for family in () if one is None else _families(backend, one):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family
    yield from families.values()


def _families(backend: str, figures: EngineFigures) -> Iterator[Metric]:
    engine = (figures.model_name, "0")
    for make, name, text, field in NUMBERS:
        key, labels = (engine, LABELS) if name.startswith("vllm:") else ((backend,), ("backend",))
        if (value := attrgetter(field)(figures)) is not None:
            yield make(name, text, {key: value}, *labels)
    yield gauge(
        "vllm:cache_config_info",
        "The KV cache's shape.",
        {(*engine, str(figures.load.block_size), str(figures.load.total_blocks)): 1},
        *LABELS, "block_size", "num_gpu_blocks",
    )  # fmt: skip
    for shown in figures.distributions:
        histogram = HistogramMetricFamily(shown.name, shown.text, labels=LABELS)
        histogram.add_metric(engine, cumulative(shown.bounds, shown.counts), shown.total)
        yield histogram
    if figures.loras is not None:
        names = (",".join(figures.loras.running), ",".join(figures.loras.waiting))
        # Readers use the newest series.
        yield gauge(
            "vllm:lora_requests_info",
            "Adapters of the requests; the value is the time of this reading.",
            {(str(figures.loras.max_loras), *names): time.time()},
            "max_lora", "running_lora_adapters", "waiting_lora_adapters",
        )  # fmt: skip
