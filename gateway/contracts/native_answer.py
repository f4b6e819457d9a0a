"""The native contract's answers: JSON, server-sent events, and the events of the WebSocket."""

from collections.abc import Sequence
from typing import Any, Final, NotRequired

import orjson
from msgspec import to_builtins
from typing_extensions import TypedDict

from budgeting.values import Plan, ToolCall, ToolKind
from gateway.contracts.answer import Answer, BudgetReport, Fallback, Timings
from gateway.contracts.dialect import ContractDialect, Header, ParsedRequest, TrimReport
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.native import NativeRequest, to_request
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import parse
from gateway.contracts.values import Usage
from gateway.errors import PublicError


class NativeCall(TypedDict):
    """A tool call; ``arguments`` is JSON, or a custom tool's input if ``kind`` is ``custom``."""

    id: str
    name: str
    arguments: str
    kind: NotRequired[ToolKind]


class AnswerReport(TypedDict):
    """What the answers of all contracts say about themselves."""

    request_id: str
    backend: str
    backend_version: str
    trace_id: str
    finish_reason: str
    timings: Timings
    fallback: Fallback | None
    budget: BudgetReport
    warnings: list[str]


class AnswerBody(AnswerReport):
    """The native answer; the stream's ``done`` event is the same without text, reasoning and calls."""

    output_text: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[NativeCall]]
    usage: Usage


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


def usage_body(usage: Usage) -> dict[str, int]:
    """The token counts; reasoning tokens and those written to a cache only if there are any."""
    counts = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    if usage.reasoning_tokens:
        counts["reasoning_tokens"] = usage.reasoning_tokens
    if usage.cache_write_tokens:
        counts["cache_write_tokens"] = usage.cache_write_tokens
    return counts


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
    body: ErrorBody = {"error": error_detail(error, request_id)}
    return error.status, orjson.dumps(body)


def answer_report(answer: Answer) -> dict[str, Any]:
    return {
        "request_id": answer.request_id,
        "backend": answer.backend,
        "backend_version": answer.backend_version,
        "trace_id": answer.trace_id,
        "finish_reason": answer.finish_reason,
        "timings": to_builtins(answer.timings),
        "fallback": answer.fallback,
        "budget": to_builtins(answer.budget),
        "warnings": answer.warnings,
    }


def metadata(answer: Answer) -> dict[str, Any]:
    """The fields of an answer that its stream has not sent before; the ``done`` event contains them."""
    return {**answer_report(answer), "usage": usage_body(answer.usage)}


def answer_json(answer: Answer) -> bytes:
    body = {**metadata(answer), "output_text": answer.output_text}
    if answer.reasoning is not None:
        body["reasoning"] = answer.reasoning
    if answer.tool_calls:
        body["tool_calls"] = [_call_body(call) for call in answer.tool_calls]
    return orjson.dumps(body)


def _call_body(call: ToolCall) -> NativeCall:
    body: NativeCall = {"id": call.id, "name": call.name, "arguments": call.arguments}
    if call.kind is not ToolKind.FUNCTION:
        body["kind"] = call.kind
    return body


def answer_event(event: Delta) -> bytes:
    match event:
        case Reasoning():
            body: dict[str, object] = {"type": "reasoning", "delta": event.text}
        case ToolBegin():
            body = {"type": "tool_begin", "index": event.call, "id": event.id, "name": event.text}
            if event.kind is not ToolKind.FUNCTION:
                body["kind"] = event.kind
        case ToolArgs():
            body = {"type": "tool_args", "index": event.call, "delta": event.text}
        case ToolEnd():
            body = {"type": "tool_end", "index": event.call}
        case _:
            body = {"type": "token", "delta": event.text}
    return orjson.dumps(body)


def done_event(answer: Answer) -> bytes:
    return orjson.dumps({"type": "done", **metadata(answer)})


def error_event(error: PublicError, request_id: str, *, partial: bool) -> bytes:
    return orjson.dumps({"type": "error", "error": error_detail(error, request_id), "partial": partial})


class NativeFrames:
    """The native stream: ``token`` and :func:`answer_event`, then ``done`` or ``error``."""

    opening: Final = b""
    ping: Final = b""
    around: Final = (b'data: {"type":"token","delta":', b"}\n\n")

    def delta(self, delta: Delta) -> bytes:
        """One event around one JSON string: no object is built per token. The only choice is text."""
        return self.around[0] + orjson.dumps(delta.text) + self.around[1]

    def event(self, event: Delta) -> bytes:
        return b"data: " + answer_event(event) + b"\n\n"

    def finish(self, answer: Answer) -> bytes:
        return b"data: " + done_event(answer) + b"\n\n"

    def fail(self, error: PublicError, request_id: str) -> bytes:
        return b"data: " + error_event(error, request_id, partial=True) + b"\n\n"


class NativeDialect(ContractDialect):
    """The native contract, as the HTTP edge uses it."""

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        return ParsedRequest(to_request(parse(NativeRequest, body), origin))

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        return answer_json(answer)

    def headers(self, report: TrimReport) -> Sequence[Header]:
        """No headers: the body contains everything."""
        return ()

    def frames(
        self, asked: ParsedRequest, model: str | None = None, plan: Plan | None = None, cached_tokens: int = 0
    ) -> NativeFrames:
        return NativeFrames()

    error = staticmethod(error_json)
