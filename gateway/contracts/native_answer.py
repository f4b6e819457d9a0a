"""The native contract's answers: JSON, server-sent events, and the events of the WebSocket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NotRequired

import orjson
from typing_extensions import TypedDict

from gateway.contracts.dialect import Cuts, Header, ParsedRequest
from gateway.contracts.native import NativeRequest, NativeSampling, to_request
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.values import Answer, BudgetReport, Fallback, Timings, TokenLogprob
from gateway.errors import PublicError

_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {name: f"sampling.{name}" for name in NativeSampling.model_fields}
)
"""Inside, errors name these fields without a prefix; in this contract they are part of ``sampling``."""


class UsageBody(TypedDict):
    """Tokens of an answer; ``cached_tokens`` is part of ``input_tokens``."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int


class TimingsBody(TypedDict):
    """Milliseconds from arrival."""

    queue_wait_ms: float
    ttft_ms: float | None
    total_ms: float


class FallbackBody(TypedDict):
    """The leg of the fallback chain that answered, and why."""

    kind: str
    reason: str
    retry_after_ms: int | None


class BudgetBody(TypedDict):
    """Tokens sent, section by section, and what was left out."""

    system: int
    retrieval: int
    recent_turns: int
    older_summary: int
    generation_reserve: int
    dropped_chunks: list[str]
    dropped_turns: int
    cut_chunks: NotRequired[list[str]]
    merged_chunks: NotRequired[list[str]]
    summarized_turns: NotRequired[int]


class AnswerBody(TypedDict):
    """The native answer; the stream's ``done`` event is the same without ``output_text``."""

    request_id: str
    backend: str
    backend_version: str
    trace_id: str
    output_text: NotRequired[str]
    finish_reason: str
    usage: UsageBody
    timings: TimingsBody
    fallback: FallbackBody | None
    budget: BudgetBody
    warnings: list[str]


class ErrorDetail(TypedDict):
    """What went wrong, for programs (``code``) and people (``message``)."""

    code: str
    message: str
    param: str | None
    request_id: str
    retry_after_ms: int | None


class ErrorBody(TypedDict):
    """The native contract's error."""

    error: ErrorDetail


def timings_body(timings: Timings) -> TimingsBody:
    """Rounded to microseconds: finer digits are noise."""
    ttft = timings.ttft_ms
    return {
        "queue_wait_ms": round(timings.queue_wait_ms, 3),
        "ttft_ms": None if ttft is None else round(ttft, 3),
        "total_ms": round(timings.total_ms, 3),
    }


def fallback_body(fallback: Fallback | None) -> FallbackBody | None:
    """``None`` when the meant backend answered."""
    if fallback is None:
        return None
    return {"kind": fallback.kind, "reason": fallback.reason, "retry_after_ms": fallback.retry_after_ms}


def budget_body(budget: BudgetReport) -> BudgetBody:
    """The budget's report."""
    body: BudgetBody = {
        "system": budget.system,
        "retrieval": budget.retrieval,
        "recent_turns": budget.recent_turns,
        "older_summary": budget.older_summary,
        "generation_reserve": budget.generation_reserve,
        "dropped_chunks": list(budget.dropped_chunks),
        "dropped_turns": budget.dropped_turns,
    }
    if budget.cut_chunks:
        body["cut_chunks"] = list(budget.cut_chunks)
    if budget.merged_chunks:
        body["merged_chunks"] = list(budget.merged_chunks)
    if budget.summarized_turns:
        body["summarized_turns"] = budget.summarized_turns
    return body


def error_detail(error: PublicError, request_id: str) -> ErrorDetail:
    """The inner object of an error, in bodies and in events."""
    return {
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "request_id": request_id,
        "retry_after_ms": error.retry_after_ms,
    }


def error_json(error: PublicError, request_id: str) -> tuple[int, bytes]:
    """Status and body of an error."""
    body: ErrorBody = {"error": error_detail(error, request_id)}
    return error.status, orjson.dumps(body)


def metadata(answer: Answer) -> AnswerBody:
    """All of an answer but its text: what the stream's ``done`` event says."""
    usage = answer.usage
    return {
        "request_id": answer.request_id,
        "backend": answer.backend,
        "backend_version": answer.backend_version,
        "trace_id": answer.trace_id,
        "finish_reason": answer.finish_reason.value,
        "usage": {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": timings_body(answer.timings),
        "fallback": fallback_body(answer.fallback),
        "budget": budget_body(answer.budget),
        "warnings": list(answer.warnings),
    }


def answer_json(answer: Answer) -> bytes:
    """The body of a whole answer."""
    return orjson.dumps({**metadata(answer), "output_text": answer.output_text})


def done_event(answer: Answer) -> bytes:
    """The last event of a whole stream, as JSON."""
    return orjson.dumps({"type": "done", **metadata(answer)})


def error_event(error: PublicError, request_id: str, *, partial: bool) -> bytes:
    """The last event of a broken stream, as JSON."""
    return orjson.dumps({"type": "error", "error": error_detail(error, request_id), "partial": partial})


class NativeFrames:
    """The native stream: ``token`` events, then ``done`` or ``error``."""

    opening: Final = b""

    def delta(self, text: str, index: int = 0, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """One event around one JSON string: no object is built per token. There is one choice, and no
        log-probabilities.
        """
        return b'data: {"type":"token","delta":' + orjson.dumps(text) + b"}\n\n"

    def finish(self, answer: Answer) -> bytes:
        """The ``done`` event."""
        return b"data: " + done_event(answer) + b"\n\n"

    def fail(self, error: PublicError, request_id: str, *, partial: bool) -> bytes:
        """The ``error`` event."""
        return b"data: " + error_event(error, request_id, partial=partial) + b"\n\n"


class NativeDialect:
    """The native contract, as the HTTP edge uses it."""

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        """Raises InvalidRequest (InvalidJson when the body is not JSON)."""
        return ParsedRequest(to_request(parse(NativeRequest, body), origin), fields=_FIELDS)

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        """The JSON body of a whole answer."""
        return answer_json(answer)

    def headers(self, cuts: Cuts) -> Sequence[Header]:
        """None: the body holds everything."""
        return ()

    def frames(self, asked: ParsedRequest) -> NativeFrames:
        """The frames of a stream."""
        return NativeFrames()

    def error(self, error: PublicError, request_id: str) -> tuple[int, bytes]:
        """HTTP status and JSON body of an error."""
        return error_json(error, request_id)
