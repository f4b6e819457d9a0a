"""Builds tracing and its export to an OpenTelemetry collector."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from gateway.config.errors import ConfigError
from gateway.config.tracing import TracingConfig
from observability.redact import REDACTED, scrub
from observability.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource


def make_tracing(config: TracingConfig, version: str) -> Tracing:
    """Build tracing: trace ids, and spans if a collector is configured. Raises ConfigError with the key."""
    if config.otlp_endpoint is None:
        return Tracing()
    # Imported only for a collector: importing the SDK and its exporter takes 80 ms.
    from observability.trace_export import TraceSender
    from observability.trace_exporter import CollectorAddress, exporter_to

    headers = tuple(config.headers.items())
    address = CollectorAddress(
        config.otlp_endpoint, config.protocol, headers, config.ca_file, config.timeout_seconds
    )
    try:
        exporter = exporter_to(address)
    except OSError as error:
        raise ConfigError(f"tracing.ca_file: {config.ca_file}: {error.strerror}") from None
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from None
    resource = resource_of(config, version)
    log = structlog.get_logger("gateway")

    def on_change(reason: str | None) -> None:
        if reason is None:
            log.info("trace collector takes spans again")
        else:
            log.warning("trace collector does not take spans", reason=reason)

    sender = TraceSender(
        exporter, resource=resource, version=version, scrub=redaction(config.redact), on_change=on_change
    )
    return Tracing(sender, sample_ratio=config.sample_ratio, follow_callers=config.follow_callers)


def resource_of(config: TracingConfig, version: str) -> "Resource":
    """What describes this process in traces: defaults, OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME, keys."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    name = {"service.name": config.service_name}
    instance = f"{socket.gethostname()}:{os.getpid()}"  # a machine may run several gateways
    found = Resource.create({**name, "service.version": version, "service.instance.id": instance}).merge(
        OTELResourceDetector().detect()
    )
    return found.merge(Resource(name)) if "service_name" in config.model_fields_set else found


def redaction(patterns: Sequence[str]) -> Callable[[str], str]:
    """Return a function that redacts credentials and matches of the operator's ``patterns``."""
    compiled = [re.compile(pattern) for pattern in patterns]

    def redacted(text: str) -> str:
        text = scrub(text)
        for pattern in compiled:
            text = pattern.sub(REDACTED, text)
        return text

    return redacted
