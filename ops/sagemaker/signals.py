"""Publishes the gateway's queue and active sequences in CloudWatch, for the endpoint's autoscaling.

SageMaker's own metrics, CPU and invocations, do not show that a GPU is full.
"""

from collections.abc import Callable, Mapping
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


def metric_data(page: str, *, endpoint: str, variant: str) -> dict[str, Any]:
    """The arguments of CloudWatch's ``put_metric_data`` for the gateway's ``/metrics``.

    They are the load of one instance: running sequences, requests waiting here or in the engine, used KV
    memory. Missing metrics count as 0.
    """
    kv_usage = max((sample.value for sample in samples_of(page, "vllm:kv_cache_usage_perc")), default=0.0)
    figures: Mapping[str, tuple[float, str]] = {
        ACTIVE: (total_of(page, "vllm:num_requests_running"), "Count"),
        WAITING: (sum(sample.value for sample in samples_of(page, *_WAITING_FAMILIES)), "Count"),
        KV_USAGE: (100 * kv_usage, "Percent"),
    }
    dimensions = [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": variant}]
    return {
        "Namespace": NAMESPACE,
        "MetricData": [
            {"MetricName": name, "Dimensions": dimensions, "Value": value, "Unit": unit}
            for name, (value, unit) in figures.items()
        ],
    }


def publish(put: Callable[[], object], *, pause: Callable[[], bool]) -> None:
    """Call ``put``, which publishes once, after each ``pause`` until that returns true.

    No error ends the loop: after an outage of CloudWatch the endpoint must scale again.
    """
    log, failing = structlog.get_logger("sagemaker"), False
    while not pause():
        try:
            put()
        except Exception as error:  # botocore's errors have no base class to name without boto3
            if not failing:
                reason = " ".join(str(error).split())[:MAX_REASON]
                log.warning("signals not published", error=type(error).__name__, reason=reason)
            failing = True
            continue
        if failing:
            log.info("signals published again")
        failing = False
