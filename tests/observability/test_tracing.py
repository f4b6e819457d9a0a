import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from budgeting.values import Message, Role, ToolCall
from gateway.config.tracing import TracingConfig
from gateway.wiring.tracing import resource_of
from observability.events import RequestRecord, ResumeFact
from observability.redact import scrub as without_credentials
from observability.trace_context import RootSpan, parse_traceparent, usable_tracestate
from observability.trace_export import MAX_BATCH, MAX_WAITING, TraceSender
from observability.trace_exporter import CollectorAddress, exporter_to, traces_url
from observability.trace_facts import Content, EdgeRecord, TraceFacts
from observability.trace_steps import CallSpan, TraceStep
from observability.tracing import Tracing
from tests.observability.collector import CLIENT, SERVER, Collected, attributes_of, collecting
from tests.observability.conftest import RECORD

Make = Callable[..., RequestRecord]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
START_NS = 1_700_000_000_000_000_000


class MemoryExporter(SpanExporter):
    """An exporter that stores its batches; the first ``failures`` exports fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.batches: list[bytes] = []
        self.closed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.failures:
            self.failures -= 1
            return SpanExportResult.FAILURE
        self.batches.append(encode_spans(spans).SerializeToString())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.closed += 1

    @property
    def spans(self) -> list[Span]:
        collected = Collected()
        collected.requests = [ExportTraceServiceRequest.FromString(batch) for batch in self.batches]
        return collected.spans


def sender_to(
    exporter: SpanExporter,
    scrub: Callable[[str], str] = str,
    on_change: Callable[[str | None], None] = lambda why: None,
    clock: Callable[[], float] = time.monotonic,
) -> TraceSender:
    return TraceSender(
        exporter,
        resource=Resource({"service.name": "sluice"}),
        version="1.2.3",
        scrub=scrub,
        on_change=on_change,
        clock=clock,
        delay_s=0.02,
    )


def until(true: Callable[[], bool]) -> None:
    """Polls for a minute: the sender is a thread that signals nothing."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Recorded:
    exporter: MemoryExporter
    tracing: Tracing

    def spans(self) -> list[Span]:
        assert self.tracing.shutdown(60)
        return self.exporter.spans

    def root(self) -> Span:
        (root,) = [span for span in self.spans() if span.kind == SERVER]
        return root


def recording(**settings: object) -> Recorded:
    exporter = MemoryExporter()
    scrub = settings.pop("scrub", str)
    tracing = Tracing(
        sender_to(exporter, scrub),  # type: ignore[arg-type]
        rng=random.Random(1),
        unix_ns=lambda: START_NS,
        **settings,  # type: ignore[arg-type]
    )
    return Recorded(exporter, tracing)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = recording()
    yield recorded
    recorded.tracing.shutdown(5)


# Ids and context


def test_without_a_collector_trace_ids_are_real_and_unique() -> None:
    tracing = Tracing()
    ids = {tracing.begin().trace_id for _ in range(2000)}
    assert len(ids) == 2000
    assert all(len(trace_id) == 32 and int(trace_id, 16) for trace_id in ids)
    assert not tracing.exporting


def test_without_a_collector_nothing_of_the_export_is_imported() -> None:
    code = (
        "import sys; from observability.tracing import Tracing; Tracing().begin(); "
        "assert not any(name.startswith(('opentelemetry', 'requests', 'grpc')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_valid_parent_is_honoured_and_handed_on(recorded: Recorded) -> None:
    for tracing in (Tracing(), recorded.tracing):
        root = tracing.begin(f"00-{TRACE}-{SPAN}-01")
        assert root.trace_id == TRACE
        handed_on = parse_traceparent(root.headers(0).decode().removeprefix("traceparent:"))
        assert handed_on is not None
        assert (handed_on.trace_id, handed_on.flags) == (TRACE, 1)
        assert handed_on.span_id == f"{root.span_id:016x}" != SPAN


def test_an_invalid_parent_begins_a_new_trace_and_its_state_goes_with_it() -> None:
    root = Tracing().begin(f"00-{'0' * 32}-{SPAN}-01", trace_state="a=1")
    assert root.trace_id != "0" * 32 and root.trace_state is None


def test_flags_without_a_meaning_are_not_handed_on() -> None:
    for sent, handed_on in (("ff", "03"), ("fe", "02"), ("05", "01"), ("04", "00")):
        line = Tracing().begin(f"00-{TRACE}-{SPAN}-{sent}").headers(1).decode()
        assert line.endswith(f"-{handed_on}\r\n")


def test_a_trace_id_already_in_use_is_kept_unless_the_caller_sent_a_trace() -> None:
    given_id, brought = "a" * 32, "b" * 32
    assert Tracing().begin(None, trace_id=given_id).trace_id == given_id
    assert Tracing().begin(f"00-{brought}-{'c' * 16}-01", trace_id=given_id).trace_id == brought


def test_a_call_takes_the_context_along_below_its_own_span() -> None:
    root = Tracing().begin(f"00-{TRACE}-{SPAN}-01", trace_state="vendor=x,other=y")
    lines = root.headers(3).decode().split("\r\n")
    assert lines == [
        f"traceparent: 00-{TRACE}-{root.child_id(3):016x}-01",
        "tracestate: vendor=x,other=y",
        "",
    ]


@given(st.integers(1, 2**64 - 1), st.sets(st.integers(1, 2**21), min_size=2, max_size=50))
def test_spans_of_a_trace_have_ids_of_their_own(span_id: int, numbers: set[int]) -> None:
    root = RootSpan(TRACE, span_id, None, 0, START_NS)
    ids = {root.child_id(number) for number in numbers} | {span_id}
    assert len(ids) == len(numbers) + 1 and 0 not in ids


@pytest.mark.parametrize("header", [b"a=1", b"a@b=x/y z!,k-1=2", b"a=1, b=2", b"a=1,,b=2"])
def test_a_tracestate_is_handed_on_as_it_came(header: bytes) -> None:
    assert usable_tracestate(header) == header.decode()


@pytest.mark.parametrize("header", [None, b"", b"novalue", b"A=1", b"a=1\r\nx: y", b"a=" + b"x" * 600,
                                    ",".join(f"k{i}=1" for i in range(33)).encode()])  # fmt: skip
def test_what_is_no_tracestate_is_dropped(header: bytes | None) -> None:
    assert usable_tracestate(header) is None


# Spans


def test_a_request_is_one_root_span_with_a_child_for_each_stage(recorded: Recorded, record: Make) -> None:
    root = recorded.tracing.begin()
    recorded.tracing.finish(root, record())
    spans = recorded.spans()
    roots = [span for span in spans if not span.parent_span_id]
    assert [span.name for span in roots] == ["chat llama-8b-awq"]
    assert [span.name for span in spans if span.parent_span_id] == ["plan", "admit", "generate", "account"]
    assert {span.trace_id.hex() for span in spans} == {root.trace_id}
    assert {span.parent_span_id for span in spans if span.parent_span_id} == {roots[0].span_id}


def test_stages_follow_one_another_from_the_arrival_on(recorded: Recorded, record: Make) -> None:
    root = recorded.tracing.begin(ago_s=0.25)
    recorded.tracing.finish(root, record(stage_ms={"plan": 0.5, "generate": 10.0}))
    spans = {span.name: span for span in recorded.spans()}
    arrived = START_NS - 250_000_000
    plan, generate, whole = spans["plan"], spans["generate"], spans["chat llama-8b-awq"]
    assert (plan.start_time_unix_nano, plan.end_time_unix_nano) == (arrived, arrived + 500_000)
    assert (generate.start_time_unix_nano, generate.end_time_unix_nano) == (
        arrived + 500_000, arrived + 10_500_000,
    )  # fmt: skip
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (arrived, arrived + 912_400_000)


def test_attempts_waits_and_calls_hang_below_the_stage_that_made_them(
    recorded: Recorded, record: Make
) -> None:
    steps = (
        TraceStep("attempt", "pool", 1, number=1, began_ms=4.0, took_ms=20.0, failure="timeout", calls=[
            CallSpan("http://a:8001/v1", number=2, began_ms=4.1, took_ms=19.0, failure="timeout"),
            CallSpan("http://b:8002/v1", True, number=3, began_ms=14.0, took_ms=9.0, failure="cancelled"),
        ]),
        TraceStep("attempt", "pool", 2, "spelled", 100.0, number=4, began_ms=124.0, took_ms=20.0),
        TraceStep("response_cache", mode="miss", number=5, began_ms=150.0, took_ms=1.0),
    )  # fmt: skip
    root = recorded.tracing.begin()
    recorded.tracing.finish(
        root, record(), lambda: TraceFacts(steps, "refused", "queue_full", {"max_tokens": 64})
    )
    spans = recorded.spans()
    by_name = {span.name: span for span in spans}
    (first, again) = [span for span in spans if span.name == "attempt pool"]
    assert first.parent_span_id == again.parent_span_id == by_name["generate"].span_id
    assert (first.kind, first.status.code) == (CLIENT, Status.STATUS_CODE_ERROR)
    assert attributes_of(first)["error.type"] == "timeout"
    assert attributes_of(again)["sluice.attempt.number"] == 2
    assert attributes_of(again)["sluice.attempt.waited_ms"] == 100.0
    assert attributes_of(again)["sluice.step.mode"] == "spelled"
    late, hedge = by_name["call http://a:8001/v1"], by_name["call http://b:8002/v1"]
    assert late.parent_span_id == hedge.parent_span_id == first.span_id
    assert late.span_id.hex() == f"{root.child_id(2):016x}"
    assert attributes_of(hedge) == {
        "server.address": "b", "server.port": 8002, "sluice.hedge": True, "error.type": "cancelled",
    }  # fmt: skip
    values = attributes_of(recorded.root())
    assert values["sluice.admission.decision"] == "refused"
    assert values["sluice.admission.reason"] == "queue_full"
    assert (values["gen_ai.request.max_tokens"], values["sluice.attempts"]) == (64, 2)


@pytest.mark.parametrize(
    ("stages", "steps", "last"),
    [
        ({}, (), None),
        ({"canonicalize": 1.0}, (), "budget"),
        ({"canonicalize": 1.0, "budget": 1.0, "adapter": 1.0, "rank": 1.0}, (), "admit"),
        (
            {"canonicalize": 1.0, "budget": 1.0, "adapter": 1.0, "rank": 1.0},
            (TraceStep("refused", "local", number=1, began_ms=4.0, failure="queue_full"),),
            "generate",
        ),
    ],
)
def test_the_stage_in_which_a_request_ended_has_a_span_too(
    recorded: Recorded,
    record: Make,
    stages: dict[str, float],
    steps: tuple[TraceStep, ...],
    last: str | None,
) -> None:
    ended = record(status=503, error_code="queue_full", stage_ms=stages, total_ms=10.0)
    recorded.tracing.finish(recorded.tracing.begin(), ended, lambda: TraceFacts(steps))
    spans = recorded.spans()
    ids = {span.span_id for span in spans}
    assert all(span.parent_span_id in ids for span in spans if span.kind != SERVER)
    if last is None:
        assert len(spans) == 1
    else:
        (broken,) = [span for span in spans if span.name == last]
        assert broken.status.code == Status.STATUS_CODE_ERROR
        assert broken.end_time_unix_nano == START_NS + 10_000_000


def test_a_trace_shows_each_seam_where_it_was(recorded: Recorded, record: Make) -> None:
    seams = (ResumeFact(12.5, "local", "local", "exact", 3), ResumeFact(40.0, "local", "bedrock", "text", 9))
    recorded.tracing.finish(recorded.tracing.begin(), record(seams=seams))
    root = recorded.root()
    assert attributes_of(root)["sluice.seams"] == 2
    assert [event.time_unix_nano - START_NS for event in root.events] == [12_500_000, 40_000_000]
    assert {one.key: one.value.string_value or one.value.int_value for one in root.events[1].attributes} == {
        "sluice.seam.from": "local",
        "sluice.seam.to": "bedrock",
        "sluice.seam.mode": "text",
        "sluice.seam.tokens": 9,
    }


def test_a_request_without_a_seam_says_nothing_of_seams(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record())
    root = recorded.root()
    assert "sluice.seams" not in attributes_of(root) and not root.events


def test_a_span_has_the_finish_reasons_of_all_choices(recorded: Recorded, record: Make) -> None:
    facts = TraceFacts(choices=2, finish_reasons=("stop", "length"))
    recorded.tracing.finish(recorded.tracing.begin(), record(), lambda: facts)
    assert attributes_of(recorded.root())["gen_ai.response.finish_reasons"] == ["stop", "length"]


def test_attributes_use_the_conventions_names_and_ours(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record())
    values = attributes_of(recorded.root())
    assert values["gen_ai.operation.name"] == "chat"
    assert values["gen_ai.usage.input_tokens"] == 842
    assert values["gen_ai.usage.cache_read.input_tokens"] == values["sluice.cached_tokens"] == 640
    assert values["gen_ai.response.finish_reasons"] == ["stop"]
    assert values["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.088)
    assert values["sluice.adapter"] == "manga_domain_v3"
    assert values["sluice.adapter_rule"] == "rule[1]"
    assert values["sluice.prompt_version"] == "chat-manga-2.1"
    assert values["sluice.revision"] == 7
    assert values["sluice.backend_version"] == "llama-8b-awq+manga_domain_v3"
    assert values["sluice.prefix_cache_hit"] is True
    assert values["sluice.queue_wait_ms"] == 3.1
    assert values["sluice.ttft_ms"] == 88.0
    assert "error.type" not in values


@pytest.mark.parametrize("contract", ["embeddings", "rerank", "audio"])
def test_vectors_scores_and_transcriptions_are_no_chats(
    recorded: Recorded, record: Make, contract: str
) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(contract=contract, model="bge-m3"))
    root = recorded.root()
    assert (root.name, attributes_of(root)["gen_ai.operation.name"]) == (f"{contract} bge-m3", contract)


def test_a_request_that_was_refused_before_it_had_an_id_has_none_in_its_span(
    recorded: Recorded, record: Make
) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(generation_id=""))
    assert "gen_ai.response.id" not in attributes_of(recorded.root())


def test_bedrock_is_named_as_the_conventions_do(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(backend="bedrock", contract="completions"))
    values = attributes_of(recorded.root())
    assert (values["gen_ai.provider.name"], values["gen_ai.operation.name"]) == (
        "aws.bedrock", "text_completion",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.STATUS_CODE_UNSET),
        ({"status": 429, "error_code": "rate_limited"}, Status.STATUS_CODE_UNSET),
        ({"status": 499, "finish_reason": "cancelled"}, Status.STATUS_CODE_UNSET),
        ({"status": 503, "error_code": "queue_full"}, Status.STATUS_CODE_ERROR),
        ({"status": 200, "error_code": "backend_unavailable"}, Status.STATUS_CODE_ERROR),
    ],
)
def test_only_our_own_faults_are_errors(
    recorded: Recorded, record: Make, changes: dict[str, object], status: int
) -> None:
    recorded.tracing.finish(recorded.tracing.begin(), record(**changes))
    assert recorded.root().status.code == status


def test_an_answer_without_a_generation_is_a_span_named_by_its_path(recorded: Recorded) -> None:
    edge = EdgeRecord("req_1", TRACE, "GET", "/v1/models", 401, 1.5, "missing_key")
    recorded.tracing.finish(recorded.tracing.begin(), edge)
    root = recorded.root()
    assert root.name == "GET /v1/models"
    assert attributes_of(root)["http.response.status_code"] == 401


# Content


def test_text_is_told_only_of_routes_that_opted_in_and_through_the_redaction(record: Make) -> None:
    recorded = recording(scrub=lambda text: text.replace("4711", "[card]"))
    turns = (Message(Role.SYSTEM, "be kind"), Message(Role.USER, "my card is 4711"))
    said = Content(turns, (Message(Role.ASSISTANT, "noted 4711 \ud800"),))
    recorded.tracing.finish(recorded.tracing.begin(), record(), lambda: TraceFacts(content=said))
    recorded.tracing.finish(recorded.tracing.begin(), record())
    opted_in, other = [attributes_of(span) for span in recorded.spans() if span.kind == SERVER]
    assert opted_in["gen_ai.input.messages"] == (
        '[{"role":"user","parts":[{"type":"text","content":"my card is [card]"}]}]'
    )
    (answer,) = json.loads(opted_in["gen_ai.output.messages"])
    assert (answer["role"], answer["finish_reason"]) == ("assistant", "stop")  # the conventions require both
    assert answer["parts"][0]["content"].startswith("noted [card]")
    assert opted_in["gen_ai.system_instructions"] == '[{"type":"text","content":"be kind"}]'
    assert not {name for name in other if "messages" in name or "instructions" in name}


def test_recorded_content_has_tool_calls_their_results_and_every_choice(record: Make) -> None:
    recorded = recording(scrub=lambda text: text.replace("4711", "[card]"))
    called = Message(Role.ASSISTANT, "", (ToolCall("call_1", "pay", '{"card":4711}'),), reasoning="I look")
    result = Message(Role.TOOL, "paid with 4711", tool_call_id="call_1")
    choices = (Message(Role.ASSISTANT, "Done."), Message(Role.ASSISTANT, "Do"))
    facts = TraceFacts(content=Content((called, result), choices), finish_reasons=("stop", "length"))
    recorded.tracing.finish(recorded.tracing.begin(), record(), lambda: facts)
    values = attributes_of(recorded.root())
    assert [one["parts"] for one in json.loads(values["gen_ai.input.messages"])] == [
        [
            {"type": "reasoning", "content": "I look"},
            {"type": "tool_call", "id": "call_1", "name": "pay", "arguments": '{"card":[card]}'},
        ],
        [{"type": "tool_call_response", "id": "call_1", "response": "paid with [card]"}],
    ]
    answers = json.loads(values["gen_ai.output.messages"])
    assert [(one["parts"][0]["content"], one["finish_reason"]) for one in answers] == [
        ("Done.", "stop"),
        ("Do", "length"),
    ]


def test_recorded_text_is_bounded_and_keeps_the_last_turn(record: Make) -> None:
    recorded = recording()
    turns = tuple(Message(Role.USER, f"{number} " * 8_000) for number in range(8))
    answer = Message(Role.ASSISTANT, "y" * 1_000_000)
    said = Content((*turns, Message(Role.USER, "the last")), (answer,))
    recorded.tracing.finish(recorded.tracing.begin(), record(), lambda: TraceFacts(content=said))
    values = attributes_of(recorded.root())
    assert "the last" in values["gen_ai.input.messages"]
    assert len(values["gen_ai.input.messages"]) + len(values["gen_ai.output.messages"]) < 50_000


# Sampling


def test_the_head_keeps_its_share_by_the_traces_id_alone(record: Make) -> None:
    recorded = recording(sample_ratio=0.25)
    roots = [recorded.tracing.begin() for _ in range(2_000)]
    for root in roots:
        recorded.tracing.finish(root, record(total_ms=1.0))
    left = {span.trace_id.hex() for span in recorded.spans()}
    assert 400 < len(left) < 600
    assert left == {root.trace_id for root in roots if root.sampled}
    again = recording(sample_ratio=0.25).tracing
    assert all(again.begin(trace_id=root.trace_id).sampled == root.sampled for root in roots)
    assert recorded.tracing.figures.left_out == 2_000 - len(left)


def test_the_tail_keeps_every_error_fallback_seam_and_slow_one(record: Make) -> None:
    recorded = recording(sample_ratio=0.0)
    left = [
        record(request_id="error", status=503, error_code="queue_full"),
        record(request_id="refused", status=401, error_code="missing_key"),
        record(request_id="broken", error_code="backend_unavailable"),
        record(request_id="fallback", fallback_kind="bedrock", fallback_reason="timeout"),
        record(request_id="seam", seams=(ResumeFact(1.0, "a", "b", "exact", 3),)),
        record(request_id="left", status=499, error_code="cancelled"),
    ]
    for number in range(300):
        recorded.tracing.finish(recorded.tracing.begin(), record(request_id=f"fine {number}"))
    runs_again = record(request_id="again", status=503, error_code="queue_full", batch_line=True)
    recorded.tracing.finish(recorded.tracing.begin(), runs_again)
    for one in left:
        recorded.tracing.finish(recorded.tracing.begin(), one)
    recorded.tracing.finish(recorded.tracing.begin(), record(request_id="slow"), slow=True)
    names = [attributes_of(span)["sluice.request_id"] for span in recorded.spans() if span.kind == SERVER]
    assert sorted(names) == sorted([*(one.request_id for one in left), "slow"])


def test_the_facts_of_a_trace_that_is_left_out_are_not_collected(record: Make) -> None:
    recorded = recording(sample_ratio=0.0)
    asked: list[int] = []

    def facts() -> TraceFacts:
        asked.append(1)
        return TraceFacts()

    recorded.tracing.finish(recorded.tracing.begin(), record(), facts)
    assert not asked


@pytest.mark.parametrize(("follow", "left"), [(False, 0), (True, 1)])
def test_a_callers_wish_is_followed_only_where_the_operator_says_so(
    record: Make, follow: bool, left: int
) -> None:
    recorded = recording(sample_ratio=0.0, follow_callers=follow)
    recorded.tracing.finish(recorded.tracing.begin(f"00-{TRACE}-{SPAN}-01"), record())
    assert len({span.trace_id for span in recorded.spans()}) == left


def test_an_unsampled_parent_does_not_silence_the_root_span(recorded: Recorded, record: Make) -> None:
    recorded.tracing.finish(recorded.tracing.begin(f"00-{TRACE}-{SPAN}-00"), record())
    assert recorded.root().parent_span_id.hex() == SPAN


def test_a_request_that_never_finishes_leaves_no_span(recorded: Recorded) -> None:
    recorded.tracing.begin()
    assert recorded.spans() == []


# The wire


Texts = st.text(max_size=200) | st.just("\ud800 alone")


@given(Texts, Texts, Texts)
def test_no_text_of_a_request_makes_a_batch_unreadable(request_id: str, model: str, error: str) -> None:
    recorded = recording()
    strange = replace(RECORD, request_id=request_id, model=model, status=503, error_code=error)
    step = TraceStep("attempt", model, number=1, began_ms=0.0, took_ms=1.0, failure=error)
    recorded.tracing.finish(recorded.tracing.begin(), strange, lambda: TraceFacts((step,)))
    recorded.tracing.finish(recorded.tracing.begin(), RECORD)
    strange_root, other = [span for span in recorded.spans() if span.kind == SERVER]
    assert attributes_of(other)["sluice.request_id"] == RECORD.request_id

    def as_exported(text: str) -> str:
        return without_credentials(text).encode("utf-8", "replace").decode()

    assert attributes_of(strange_root)["sluice.request_id"] == as_exported(request_id)
    assert strange_root.name == f"chat {model}".encode("utf-8", "replace").decode()
    assert strange_root.status.message == (error or "503").encode("utf-8", "replace").decode()


def test_spans_tell_who_speaks_and_the_callers_trace_state() -> None:
    recorded = recording()
    recorded.tracing.finish(
        recorded.tracing.begin(f"00-{TRACE}-{SPAN}-01", trace_state="a=1,b@c=x y"), RECORD
    )
    spans = recorded.spans()
    (resource,) = ExportTraceServiceRequest.FromString(recorded.exporter.batches[0]).resource_spans
    assert [(one.key, one.value.string_value) for one in resource.resource.attributes] == [
        ("service.name", "sluice")
    ]
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("sluice", "1.2.3")
    assert {span.trace_state for span in spans} == {"a=1,b@c=x y"}


# The collector


@pytest.fixture
def collector() -> Iterator[Collected]:
    with collecting() as collected:
        yield collected


def test_the_sdks_variables_describe_the_process_and_the_key_of_the_service_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7,deployment.environment=prod")
    found = resource_of(TracingConfig(), "0.1").attributes
    assert (found["service.name"], found["service.instance.id"]) == ("edge", "pod-7")
    assert (found["service.version"], found["deployment.environment"]) == ("0.1", "prod")
    assert resource_of(TracingConfig(service_name="shop"), "0.1").attributes["service.name"] == "shop"
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    assert resource_of(TracingConfig(), "0.1").attributes["service.name"] == "sluice"


def test_gateways_of_one_machine_are_different_instances_of_the_service() -> None:
    described = resource_of(TracingConfig(), "0.1").attributes
    assert str(described["service.instance.id"]).endswith(f":{os.getpid()}")


def test_a_collector_over_http_gets_each_root_span_once_and_the_headers(
    collector: Collected, record: Make
) -> None:
    address = CollectorAddress(collector.url, headers=(("x-key", "abc"),))
    tracing = Tracing(sender_to(exporter_to(address)))
    begun = [tracing.begin() for _ in range(300)]
    for number, root in enumerate(begun):
        tracing.finish(root, record(status=503 if number % 3 == 0 else 200))
    assert tracing.shutdown(10)
    assert collector.paths == {"/v1/traces"}
    assert {headers["x-key"] for headers in collector.headers} == {"abc"}
    assert sorted(span.trace_id.hex() for span in collector.roots) == sorted(root.trace_id for root in begun)
    assert (tracing.figures.sent, tracing.figures.waiting) == (300, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_collector_over_grpc_gets_each_root_span_once_and_the_headers(host: str, record: Make) -> None:
    got: list[ExportTraceServiceRequest] = []
    metadata: list[dict[str, str]] = []

    def export(batch: ExportTraceServiceRequest, context: grpc.ServicerContext) -> bytes:
        got.append(batch)
        metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        return b""

    handler = grpc.unary_unary_rpc_method_handler(
        export, request_deserializer=ExportTraceServiceRequest.FromString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    try:
        port = server.add_insecure_port(f"{host}:0")
    except RuntimeError:
        pytest.skip(f"this machine has no {host}")
    server.start()
    try:
        address = CollectorAddress(f"http://{host}:{port}", "grpc", (("X-Key", "abc"),))
        tracing = Tracing(sender_to(exporter_to(address)))
        begun = [tracing.begin() for _ in range(200)]
        for root in begun:
            tracing.finish(root, record())
        assert tracing.shutdown(10)
    finally:
        server.stop(0).wait()
    collected = Collected()
    collected.requests = got
    assert sorted(span.trace_id.hex() for span in collected.roots) == sorted(root.trace_id for root in begun)
    assert {one["x-key"] for one in metadata} == {"abc"}


def test_a_batch_that_a_full_collector_turns_away_is_sent_again(collector: Collected, record: Make) -> None:
    collector.statuses = [503, 429]
    tracing = Tracing(sender_to(exporter_to(CollectorAddress(collector.url))))
    root = tracing.begin()
    tracing.finish(root, record())
    until(lambda: tracing.figures.sent == 1)
    assert [span.trace_id.hex() for span in collector.roots] == [root.trace_id]
    assert tracing.shutdown()


def test_a_batch_that_the_collector_rejects_is_dropped_counted_and_reported_only_by_the_gateway(
    collector: Collected, record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    collector.statuses = [400]
    reasons: list[str | None] = []
    tracing = Tracing(sender_to(exporter_to(CollectorAddress(collector.url)), on_change=reasons.append))
    tracing.finish(tracing.begin(), record())
    until(lambda: tracing.figures.failed == 1)
    tracing.finish(tracing.begin(), record())
    until(lambda: tracing.figures.sent == 1)
    assert len(reasons) == 2
    assert reasons[0] is not None and "code: 400" in reasons[0] and reasons[1] is None
    assert not [line for line in caplog.records if line.name.startswith("opentelemetry")]
    assert tracing.shutdown()
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").warning("another's")
    assert [line.message for line in caplog.records] == ["another's"]


def test_a_batch_that_the_collector_redirects_is_not_counted_as_sent(
    collector: Collected, record: Make
) -> None:
    collector.statuses = [301]
    reasons: list[str | None] = []
    tracing = Tracing(sender_to(exporter_to(CollectorAddress(collector.url)), on_change=reasons.append))
    tracing.finish(tracing.begin(), record())
    until(lambda: tracing.figures.failed == 1)
    assert reasons[0] is not None and "the collector redirects" in reasons[0]
    assert tracing.figures.sent == 0 and tracing.shutdown()


def test_a_batch_of_which_the_collector_rejects_spans_is_not_counted_as_sent(
    collector: Collected, record: Make
) -> None:
    rejected = ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    collector.bodies = [ExportTraceServiceResponse(partial_success=rejected).SerializeToString(), b"ok", b""]
    reasons: list[str | None] = []
    tracing = Tracing(sender_to(exporter_to(CollectorAddress(collector.url)), on_change=reasons.append))
    for number in range(3):
        tracing.finish(tracing.begin(), record())
        until(lambda done=number: tracing.figures.failed + tracing.figures.sent > done)
    assert reasons[0] is not None and "the collector rejected 2 spans of a batch: too old" in reasons[0]
    assert (tracing.figures.failed, tracing.figures.sent) == (1, 2)
    assert len(collector.requests) == 3 and tracing.shutdown()


def test_an_unstable_collector_is_reported_once_a_minute(record: Make) -> None:
    reasons: list[str | None] = []
    now = [0.0]
    exporter = MemoryExporter()
    tracing = Tracing(sender_to(exporter, on_change=reasons.append, clock=lambda: now[0]))

    def batch(*, fails: bool) -> None:
        exporter.failures = int(fails)
        before = tracing.figures
        tracing.finish(tracing.begin(), record())
        until(lambda: tracing.figures.sent + tracing.figures.failed > before.sent + before.failed)

    for _ in range(2):
        batch(fails=True)
        batch(fails=False)
    assert reasons == ["no reason given", None]
    now[0] = 61.0
    batch(fails=True)
    assert reasons == ["no reason given", None, "no reason given"]
    tracing.shutdown()
    assert exporter.closed == 1


def test_an_exporter_that_breaks_costs_its_batch_and_no_more(record: Make) -> None:
    class Broken(MemoryExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if self.failures:
                self.failures = 0
                raise ValueError("closed")
            return super().export(spans)

    reasons: list[str | None] = []
    tracing = Tracing(sender_to(Broken(1), on_change=reasons.append))
    tracing.finish(tracing.begin(), record())
    until(lambda: tracing.figures.failed == 1)
    tracing.finish(tracing.begin(), record())
    until(lambda: tracing.figures.sent == 1)
    assert reasons == ["ValueError", None]
    assert tracing.shutdown()


def test_a_trace_whose_spans_cannot_be_built_costs_its_batch_and_no_more(record: Make) -> None:
    def scrub(text: str) -> str:
        raise ValueError("no words for it")

    reasons: list[str | None] = []
    tracing = Tracing(sender_to(MemoryExporter(), scrub, reasons.append))
    said = Content((Message(Role.USER, "hi"),), ())
    tracing.finish(tracing.begin(), record(), lambda: TraceFacts(content=said))
    until(lambda: tracing.figures.failed == 1)
    tracing.finish(tracing.begin(), record())
    until(lambda: tracing.figures.sent == 1)
    assert reasons == ["ValueError", None]
    assert tracing.shutdown()


def test_an_unreachable_collector_costs_requests_nothing_and_the_loss_is_counted(record: Make) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # never listens: connections are refused
        address = CollectorAddress(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        tracing = Tracing(sender_to(exporter_to(address)))
        for _ in range(MAX_WAITING + 500):
            tracing.finish(tracing.begin(), record())
        figures = tracing.figures
        assert figures.waiting <= MAX_WAITING + MAX_BATCH
        assert figures.dropped >= 500 - MAX_BATCH
        began = time.perf_counter()
        assert not tracing.shutdown()
        assert time.perf_counter() - began < 9.0


def test_a_collector_that_takes_connections_and_never_answers_delays_no_stop(record: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        address = CollectorAddress(f"http://127.0.0.1:{hole.getsockname()[1]}")
        tracing = Tracing(sender_to(exporter_to(address)))
        tracing.finish(tracing.begin(), record())
        hole.settimeout(10)
        hanging, _ = hole.accept()  # the batch is being sent
        began = time.perf_counter()
        assert not tracing.shutdown(timeout_s=0.3)
        assert time.perf_counter() - began < 9.0
        hanging.close()


def test_after_a_failure_a_stop_does_not_wait_for_the_collector(record: Make) -> None:
    reasons: list[str | None] = []
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = CollectorAddress(f"http://127.0.0.1:{nobody.getsockname()[1]}", timeout_s=60)
        tracing = Tracing(sender_to(exporter_to(address), on_change=reasons.append))
        tracing.finish(tracing.begin(), record())
        until(lambda: bool(reasons))  # the exporter waits before its second try
        began = time.perf_counter()
        tracing.shutdown(timeout_s=30)
        assert time.perf_counter() - began < 15.0


def test_the_collectors_address_is_completed_and_checked() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    for wrong in ("c:4317", "http://", "http://[::1", "http://c:x", "http://c:99999", "http://c:0"):
        with pytest.raises(ValueError, match=r"tracing\.otlp_endpoint"):
            traces_url(wrong)
