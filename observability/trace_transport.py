"""How batches of spans reach the collector: OTLP over HTTP with protobuf, or over gRPC.

Failures are told apart by what they mean for the batch: :class:`TryAgain` for what may pass, :class:`Refused`
for what will not (OTLP specification 1.x, "Failures").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

PROTOCOLS = ("http/protobuf", "grpc")
_RETRYABLE_STATUS = frozenset({429, 502, 503, 504})
_RETRYABLE_CODES = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
)
_GRPC_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class ExportError(Exception):
    """A batch was not taken.

    ::

        ExportError
        ├── TryAgain     the collector is away, late or full
        └── Refused      it does not take this batch
    """


class TryAgain(ExportError):
    """The same batch may be taken later."""


class Refused(ExportError):
    """The same batch will not be taken."""


class Transport(Protocol):
    """Hands one batch to a collector; used by one thread."""

    def send(self, batch: bytes, timeout_s: float) -> None:
        """Send an ``ExportTraceServiceRequest``. Raises TryAgain, Refused."""

    def close(self) -> None:
        """Give connections back."""


@dataclass(frozen=True, slots=True)
class CollectorAddress:
    """Where a collector is, and how it is spoken to.

    Args:
        endpoint: ``http://HOST:PORT`` or ``https://…``.
        protocol: one of :data:`PROTOCOLS`.
        headers: sent with every batch; may hold a key, so they are never shown.
        ca_file: PEM certificates to trust instead of the system's, for ``https``.
    """

    endpoint: str
    protocol: str = "http/protobuf"
    headers: Sequence[tuple[str, str]] = ()
    ca_file: str | None = None


def connect(address: CollectorAddress) -> Transport:
    """The transport of ``address``; nothing is sent yet.

    Raises:
        ValueError: the endpoint is no http(s) URL, or the protocol unknown; names what is allowed.
        ImportError: gRPC is asked for and not installed.
        OSError: ``ca_file`` cannot be read.
    """
    if address.protocol == "http/protobuf":
        return HttpTransport(traces_url(address.endpoint), address.headers, address.ca_file)
    if address.protocol == "grpc":
        return GrpcTransport(address)
    raise ValueError(f"tracing.protocol: {address.protocol!r}; allowed: {', '.join(PROTOCOLS)}")


class HttpTransport:
    """Posts to ``/v1/traces``."""

    def __init__(self, url: str, headers: Sequence[tuple[str, str]], ca_file: str | None = None) -> None:
        # Imported with a collector only.
        import urllib3

        self._url = url
        self._headers: Mapping[str, str] = {**dict(headers), "content-type": "application/x-protobuf"}
        if ca_file is not None:
            with open(ca_file, "rb"):
                pool = urllib3.PoolManager(num_pools=1, maxsize=1, ca_certs=ca_file)
        else:
            pool = urllib3.PoolManager(num_pools=1, maxsize=1)
        self._pool = pool
        self._failure = urllib3.exceptions.HTTPError

    def send(self, batch: bytes, timeout_s: float) -> None:
        """Send a batch; ``timeout_s`` for the connection and then for the answer."""
        try:
            answer = self._pool.request(
                "POST",
                self._url,
                body=batch,
                headers=self._headers,
                timeout=timeout_s,
                retries=False,
                redirect=False,
            )
        except (self._failure, OSError) as error:
            raise TryAgain(type(error).__name__) from error
        if answer.status in _RETRYABLE_STATUS:
            raise TryAgain(f"status {answer.status}")
        if not 200 <= answer.status < 300:
            raise Refused(f"status {answer.status}")

    def close(self) -> None:
        """Close the connection."""
        self._pool.clear()


class GrpcTransport:
    """Calls the collector's ``TraceService``."""

    def __init__(self, address: CollectorAddress) -> None:
        try:
            import grpc
        except ImportError as error:
            raise ImportError(
                "tracing.protocol: grpc needs the package grpcio; install sluice-gateway[otlp-grpc], "
                "or use http/protobuf"
            ) from error

        parts = _http_parts(address.endpoint)
        target = f"{parts.hostname}:{parts.port or 4317}"
        if parts.scheme == "https":
            roots = None
            if address.ca_file is not None:
                with open(address.ca_file, "rb") as file:
                    roots = file.read()
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(roots))
        else:
            self._channel = grpc.insecure_channel(target)
        # The batch is protobuf already, and of the answer only its coming counts.
        self._export: Any = self._channel.unary_unary(_GRPC_METHOD)
        self._metadata = tuple((name.lower(), value) for name, value in address.headers)
        self._failure = grpc.RpcError

    def send(self, batch: bytes, timeout_s: float) -> None:
        """Send a batch within ``timeout_s``."""
        try:
            self._export(batch, timeout=timeout_s, metadata=self._metadata)
        except self._failure as error:
            code = error.code().name
            raise (TryAgain if code in _RETRYABLE_CODES else Refused)(code) from error

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to; ``/v1/traces`` when ``endpoint`` has no path. Raises ValueError."""
    parts = _http_parts(endpoint)
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


def _http_parts(endpoint: str) -> Any:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "tracing.otlp_endpoint: not an http(s) URL; allowed: http://HOST:PORT, or null for none"
        )
    return parts
