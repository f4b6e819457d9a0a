"""OpenTelemetry's exporters, as this gateway asks for them: OTLP over HTTP with protobuf, or over gRPC.

An exporter encodes and posts a batch, and tries again by itself until its time for the batch is over. Why a
batch was not taken it tells its logger alone: :class:`Words` hears that, and keeps it out of the logs, where
an exporter would write with every batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit, urlunsplit

from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOLS = ("http/protobuf", "grpc")
GRPC_PORT = 4317
# Longest reason that is told; errors of HTTP libraries quote each other.
MAX_WORDS = 240


@dataclass(frozen=True, slots=True)
class CollectorAddress:
    """Where a collector is, and how it is spoken to.

    Args:
        endpoint: ``http://HOST:PORT`` or ``https://…``.
        protocol: one of :data:`PROTOCOLS`.
        headers: sent with every batch; may hold a key, so they are never shown.
        ca_file: PEM certificates to trust instead of the system's, for ``https``.
        timeout_s: for one batch, all tries and the waits between them together.
    """

    endpoint: str
    protocol: str = "http/protobuf"
    headers: Sequence[tuple[str, str]] = ()
    ca_file: str | None = None
    timeout_s: float = 10.0


def exporter_to(address: CollectorAddress) -> SpanExporter:
    """The exporter to ``address``; nothing is sent yet.

    What is not said there, compression and the client's certificate, is read from the SDK's environment
    variables (``OTEL_EXPORTER_OTLP_…``).

    Raises:
        ValueError: the endpoint is no http(s) URL, or the protocol unknown; names what is allowed.
        ImportError: gRPC is asked for and not installed.
        OSError: ``ca_file`` cannot be read.
    """
    if address.protocol == "http/protobuf":
        return _over_http(address)
    if address.protocol == "grpc":
        return _over_grpc(address)
    raise ValueError(f"tracing.protocol: {address.protocol!r}; allowed: {', '.join(PROTOCOLS)}")


def _over_http(address: CollectorAddress) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = traces_url(address.endpoint)
    _certificates(address)
    return OTLPSpanExporter(
        url,
        certificate_file=address.ca_file,
        headers=dict(address.headers),
        timeout=address.timeout_s,
    )


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
    return OTLPSpanExporter(
        f"{parts.hostname}:{parts.port or GRPC_PORT}",
        insecure=not secure,
        credentials=grpc.ssl_channel_credentials(_certificates(address)) if secure else None,
        headers=tuple((name.lower(), value) for name, value in address.headers),
        timeout=address.timeout_s,
    )


def _certificates(address: CollectorAddress) -> bytes | None:
    """What is in ``ca_file``. Raises OSError."""
    if address.ca_file is None:
        return None
    with open(address.ca_file, "rb") as file:
        return file.read()


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to; ``/v1/traces`` when ``endpoint`` has no path. Raises ValueError."""
    parts = _http_parts(endpoint)
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


def _http_parts(endpoint: str) -> SplitResult:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "tracing.otlp_endpoint: not an http(s) URL; allowed: http://HOST:PORT, or null for none"
        )
    return parts


class Words(logging.Filter):
    """Takes what an exporter says out of the log, and hands it on; of the thread that listens alone.

    Args:
        exporter: whose words; the loggers of the modules that its class is made in are listened to.
        heard: told each warning and error, at most :data:`MAX_WORDS` characters.
    """

    def __init__(self, exporter: SpanExporter, heard: Callable[[str], None]) -> None:
        super().__init__()
        self._heard = heard
        self._thread: int | None = None
        modules = {one.__module__ for one in type(exporter).__mro__}
        self._loggers = [
            logging.getLogger(name) for name in modules if name.startswith("opentelemetry.exporter")
        ]

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the log shows ``record``."""
        if record.thread != self._thread:
            return True
        if record.levelno >= logging.WARNING:
            self._heard(record.getMessage()[:MAX_WORDS])
        return False

    def listen(self) -> None:
        """Hear what this thread's exporter says from now on."""
        self._thread = threading.get_ident()
        for logger in self._loggers:
            logger.addFilter(self)

    def close(self) -> None:
        """Hear no more."""
        for logger in self._loggers:
            logger.removeFilter(self)
