"""OpenTelemetry's exporters as configured: OTLP over HTTP with protobuf, or over gRPC.

An exporter encodes and posts a batch, with retries until its timeout. It only logs why a batch failed:
:class:`ExporterErrors` removes these messages from the log, which would have one per batch.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

from opentelemetry.sdk.trace.export import SpanExporter

GRPC_PORT = 4317
MAX_REASON = 240  # longest reported reason, in characters; errors of HTTP libraries quote each other


@dataclass(frozen=True, slots=True)
class CollectorAddress:
    """A collector's address, protocol, headers (never shown: they may contain a key) and PEM certificates.

    ``timeout_s`` is for one batch with all retries.
    """

    endpoint: str
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    headers: Sequence[tuple[str, str]] = ()
    ca_file: str | None = None
    timeout_s: float = 10.0


def exporter_to(address: CollectorAddress) -> SpanExporter:
    """The exporter to ``address``; nothing is sent yet. Compression and the client's certificate come from
    the SDK's environment variables (``OTEL_EXPORTER_OTLP_…``).

    Raises ValueError for a bad endpoint, ImportError without gRPC, OSError for an unreadable ``ca_file``.
    """
    return _over_grpc(address) if address.protocol == "grpc" else _over_http(address)


def _over_http(address: CollectorAddress) -> SpanExporter:
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = traces_url(address.endpoint)
    _certificates(address)
    session = None
    if not any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):  # else the SDK makes one
        session = requests.Session()
        session.hooks["response"].append(_refuse_loss)
    return OTLPSpanExporter(
        url,
        certificate_file=address.ca_file,
        headers=dict(address.headers),
        timeout=address.timeout_s,
        session=session,
    )


def _refuse_loss(response: Any, *_: object, **__: object) -> None:
    """Raise OSError for a redirect, which the exporter does not follow, and for spans that were rejected: the
    exporter counts both as success. It does not repeat a request after an OSError.
    """
    if 300 <= response.status_code < 400:
        where = response.headers.get("location", "nowhere")
        raise OSError(f"the collector redirects to {where} (status {response.status_code})")
    if response.status_code == 200 and response.content:
        partial = _partial_success(response.content)
        if partial is not None and partial.rejected_spans > 0:
            raise OSError(
                f"the collector rejected {partial.rejected_spans} spans of a batch: {partial.error_message}"
            )


def _partial_success(content: bytes) -> Any:
    """The part of the collector's answer about rejected spans; ``None`` if the answer is not OTLP's."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        return ExportTraceServiceResponse.FromString(content).partial_success
    except DecodeError:
        return None


def _over_grpc(address: CollectorAddress) -> SpanExporter:
    try:
        import grpc
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError(
            "tracing.protocol: grpc needs opentelemetry-exporter-otlp-proto-grpc; "
            "install sluice-gateway[otlp-grpc], or use http/protobuf"
        ) from error

    parts = _http_parts(address.endpoint)
    secure = parts.scheme == "https"
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return OTLPSpanExporter(
        f"{host}:{parts.port or GRPC_PORT}",
        insecure=not secure,
        credentials=grpc.ssl_channel_credentials(_certificates(address)) if secure else None,
        headers=tuple((name.lower(), value) for name, value in address.headers),
        timeout=address.timeout_s,
    )


def _certificates(address: CollectorAddress) -> bytes | None:
    """The content of ``ca_file``. Raises OSError."""
    if address.ca_file is None:
        return None
    with open(address.ca_file, "rb") as file:
        return file.read()


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to; ``/v1/traces`` when ``endpoint`` has no path. Raises ValueError."""
    parts = _http_parts(endpoint)
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


def _http_parts(endpoint: str) -> SplitResult:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an address of IPv6 without its end, or no port
        valid = False
    if not valid:
        raise ValueError(
            "tracing.otlp_endpoint: not an http(s) URL; allowed: http://HOST:PORT, or null for none"
        )
    return parts


class ExporterErrors(logging.Filter):
    """Removes an exporter's messages from the log (only those of the listening thread), and reports its
    warnings and errors.
    """

    def __init__(self, exporter: SpanExporter, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report
        self._thread: int | None = None
        modules = {one.__module__ for one in type(exporter).__mro__}
        self._loggers = [
            logging.getLogger(name) for name in modules if name.startswith("opentelemetry.exporter")
        ]

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        if record.levelno >= logging.WARNING:
            self._report(record.getMessage()[:MAX_REASON])
        return False

    def listen(self) -> None:
        """Filter the messages of the calling thread from now on."""
        self._thread = threading.get_ident()
        for logger in self._loggers:
            logger.addFilter(self)

    def close(self) -> None:
        for logger in self._loggers:
            logger.removeFilter(self)
