import gzip
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from observability.events import RequestRecord
from observability.spans import traces_url
from observability.traceparent import parse_traceparent
from observability.tracing import Tracing

Make = Callable[..., RequestRecord]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
START_NS = 1_700_000_000_000_000_000


class Recorded:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(
            None, "1.2.3", rng=random.Random(1), unix_ns=lambda: START_NS, exporter=self.exporter
        )

    def spans(self) -> list[ReadableSpan]:
        assert self.tracing.shutdown()
        return list(self.exporter.get_finished_spans())

    def root(self) -> ReadableSpan:
        (root,) = [span for span in self.spans() if span.kind is SpanKind.SERVER]
        return root


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_without_a_collector_trace_ids_are_real_and_unique() -> None:
    tracing = Tracing(None, "1")
    ids = {tracing.begin().trace_id for _ in range(2000)}
    assert len(ids) == 2000
    assert all(len(trace_id) == 32 and int(trace_id, 16) for trace_id in ids)
    assert not tracing.exporting


def test_without_a_collector_the_sdk_is_not_even_imported() -> None:
    code = (
        "import sys; from observability.tracing import Tracing; Tracing(None, '1').begin(); "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("exporting", [False, True])
def test_a_valid_parent_is_honoured_and_handed_on(exporting: bool) -> None:
    tracing = Tracing(None, "1", exporter=InMemorySpanExporter() if exporting else None)
    root = tracing.begin(f"00-{TRACE}-{SPAN}-01")
    assert root.trace_id == TRACE
    handed_on = parse_traceparent(root.traceparent)
    assert handed_on is not None
    assert (handed_on.trace_id, handed_on.flags) == (TRACE, 1)
    assert handed_on.span_id == root.span_id != SPAN
    tracing.shutdown()


@pytest.mark.parametrize("exporting", [False, True])
def test_an_invalid_parent_begins_a_new_trace(exporting: bool) -> None:
    tracing = Tracing(None, "1", exporter=InMemorySpanExporter() if exporting else None)
    assert tracing.begin(f"00-{'0' * 32}-{SPAN}-01").trace_id != "0" * 32
    tracing.shutdown()


def test_a_request_is_one_root_span_with_a_child_for_each_stage(recorded: Recorded, record: Make) -> None:
    root = recorded.tracing.begin()
    recorded.tracing.finish(root, record())
    spans = recorded.spans()
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == ["chat llama-8b-awq"]
    assert [span.name for span in spans if span.parent is not None] == [
        "plan",
        "admit",
        "generate",
        "account",
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {root.trace_id}
    assert {span.parent.span_id for span in spans if span.parent} == {roots[0].context.span_id}


def test_stages_follow_one_another_from_the_arrival_on(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(stage_ms={"plan": 0.5, "generate": 10.0}))
    spans = {span.name: span for span in recorded.spans()}
    plan, generate, root = spans["plan"], spans["generate"], spans["chat llama-8b-awq"]
    assert (plan.start_time, plan.end_time) == (START_NS, START_NS + 500_000)
    assert (generate.start_time, generate.end_time) == (START_NS + 500_000, START_NS + 10_500_000)
    assert (root.start_time, root.end_time) == (START_NS, START_NS + 912_400_000)


def test_attributes_use_the_conventions_names_and_ours(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record())
    told = recorded.root().attributes or {}
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.usage.input_tokens"] == 842
    assert told["gen_ai.usage.cache_read.input_tokens"] == 640
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.088)
    assert told["sluice.adapter"] == "manga_domain_v3"
    assert told["sluice.prompt_version"] == "chat-manga-2.1"
    assert told["sluice.backend_version"] == "llama-8b-awq+manga_domain_v3"
    assert told["sluice.prefix_cache_hit"] is True
    assert told["sluice.queue_wait_ms"] == 3.1
    assert told["sluice.ttft_ms"] == 88.0
    assert "error.type" not in told


def test_bedrock_is_named_as_the_conventions_do(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(backend="bedrock", contract="completions"))
    told = recorded.root().attributes or {}
    assert (told["gen_ai.provider.name"], told["gen_ai.operation.name"]) == ("aws.bedrock", "text_completion")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, StatusCode.UNSET),
        ({"status": 429, "error_code": "rate_limited"}, StatusCode.UNSET),
        ({"status": 499, "finish_reason": "cancelled"}, StatusCode.UNSET),
        ({"status": 503, "error_code": "queue_full"}, StatusCode.ERROR),
        ({"status": 200, "error_code": "backend_unavailable"}, StatusCode.ERROR),
    ],
)
def test_only_our_own_faults_are_errors(
    recorded: Recorded, record: Make, changes: dict[str, object], status: StatusCode
) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(**changes))
    assert recorded.root().status.status_code is status


def test_an_unsampled_parent_does_not_silence_the_root_span(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(f"00-{TRACE}-{SPAN}-00"), record())
    root = recorded.root()
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN


def test_a_request_that_never_finishes_leaves_no_span(recorded: Recorded) -> None:
    recorded.tracing.begin()
    assert recorded.spans() == []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_real_collector_gets_exactly_one_root_span_a_request(
    collector: ThreadingHTTPServer, record: Make
) -> None:
    tracing = Tracing(f"http://127.0.0.1:{collector.server_port}", "1.2.3")
    begun = [tracing.begin() for _ in range(200)]
    for number, root in enumerate(begun):
        tracing.finish(root, record(status=503 if number % 3 == 0 else 200))
    assert tracing.shutdown()
    received = collector.received  # type: ignore[attr-defined]
    assert {path for path, _ in received} == {"/v1/traces"}
    roots = [
        span.trace_id.hex()
        for _, request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if not span.parent_span_id
    ]
    assert sorted(roots) == sorted(root.trace_id for root in begun)


def test_an_unreachable_collector_costs_requests_nothing_and_shutdown_is_bounded(record: Make) -> None:
    # 192.0.2.0/24 is reserved for documentation: nobody answers there.
    tracing = Tracing("http://192.0.2.1:4318", "1")
    began = time.perf_counter()
    for _ in range(1500):  # more spans than the queue holds
        tracing.finish(tracing.begin(), record())
    assert time.perf_counter() - began < 5.0
    began = time.perf_counter()
    tracing.shutdown(timeout_s=0.2)
    assert time.perf_counter() - began < 1.0


def test_the_collectors_address_is_completed_and_checked() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    with pytest.raises(ValueError, match=r"tracing\.otlp_endpoint"):
        traces_url("c:4317")
    with pytest.raises(ValueError, match=r"tracing\.otlp_endpoint"):
        Tracing("", "1")


def test_an_id_that_was_told_already_is_kept_unless_the_caller_brought_a_trace() -> None:
    tracing = Tracing(None, "1")
    told, brought = "a" * 32, "b" * 32
    assert tracing.begin(None, trace_id=told).trace_id == told
    assert tracing.begin(f"00-{brought}-{'c' * 16}-01", trace_id=told).trace_id == brought
