"""Publishes the gateway's queue and active sequences in CloudWatch, for the endpoint's autoscaling.

SageMaker's own metrics, CPU and invocations, do not show that a GPU is full.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from observability.metrics_text import samples_of, total_of

NAMESPACE = "Sluice"
ACTIVE = "ActiveSequences"
WAITING = "WaitingRequests"
KV_USAGE = "KvCacheUsage"
EVERY_S = 20.0  # interval in seconds: three samples in each minute that target tracking evaluates
EVERY_ENV = "SLUICE_SAGEMAKER_PUBLISH_SECONDS"
MAX_REASON = 300  # longest error message in a log line, in characters

_WAITING_FAMILIES = ("sluice_admission_queue_depth", "vllm:num_requests_waiting")


@dataclass(frozen=True, slots=True)
class InstanceSignals:
    """The load of one instance: running sequences, requests waiting here or in the engine, used KV share."""

    active: float
    waiting: float
    kv_usage: float


def signals_of(text: str) -> InstanceSignals:
    """Read the signals from Prometheus' text format; missing metrics count as 0."""
    return InstanceSignals(
        total_of(text, "vllm:num_requests_running"),
        sum(sample.value for sample in samples_of(text, *_WAITING_FAMILIES)),
        max((sample.value for sample in samples_of(text, "vllm:kv_cache_usage_perc")), default=0.0),
    )


def metric_data(signals: InstanceSignals, *, endpoint: str, variant: str) -> dict[str, Any]:
    """The arguments of CloudWatch's ``put_metric_data``."""
    dimensions = [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": variant}]
    figures: Mapping[str, tuple[float, str]] = {
        ACTIVE: (signals.active, "Count"),
        WAITING: (signals.waiting, "Count"),
        KV_USAGE: (100 * signals.kv_usage, "Percent"),
    }
    return {
        "Namespace": NAMESPACE,
        "MetricData": [
            {"MetricName": name, "Dimensions": dimensions, "Value": value, "Unit": unit}
            for name, (value, unit) in figures.items()
        ],
    }


def publish(
    read: Callable[[], str],
    put: Callable[[InstanceSignals], None],
    *,
    pause: Callable[[float], bool],
    every_s: float = EVERY_S,
) -> None:
    """Publish until ``pause``, which waits the given seconds, returns true.

    No error ends the loop: after an outage of CloudWatch the endpoint must scale again.
    """
    log, failing = structlog.get_logger("sagemaker"), False
    while not pause(every_s):
        try:
            put(signals_of(read()))
        except Exception as error:  # botocore's errors have no base class to name without boto3
            if not failing:
                reason = " ".join(str(error).split())[:MAX_REASON]
                log.warning("signals not published", error=type(error).__name__, reason=reason)
            failing = True
            continue
        if failing:
            log.info("signals published again")
        failing = False
