"""A real OTLP collector over HTTP, on a free port."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT


class Collected:
    """The requests, headers and paths that a collector has accepted."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in tuple(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.kind == SERVER]


def attributes_of(span: Span) -> dict[str, Any]:
    """A span's attributes."""
    values: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        values[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


@contextlib.contextmanager
def collecting() -> Iterator[Collected]:
    """Run a collector; it answers with ``statuses`` first, then 200, with ``bodies`` first, then without one."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = collected.statuses.pop(0) if collected.statuses else 200
            if status == 200:
                collected.requests.append(ExportTraceServiceRequest.FromString(body))
                collected.headers.append({name.lower(): value for name, value in self.headers.items()})
                collected.paths.add(self.path)
            answer = collected.bodies.pop(0) if status == 200 and collected.bodies else b""
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            if status != 200:
                self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collected.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
