"""Maps a worker's error answers and transport errors to the gateway's failure kinds."""

import email.utils
import re
from collections.abc import Mapping

import msgspec

from gateway.backends.workers.client import whole_body
from gateway.backends.workers.connection import Connection
from gateway.backends.workers.errors import (
    BadHttp,
    ConnectFailed,
    ConnectionsInUse,
    TimedOut,
    TransportError,
)
from resilience.classify_aws import kind_of_status
from resilience.failures import BackendFailure, FailureKind, invalid_input

MAX_ERROR_BYTES = 64 * 1024  # longest error answer that is read, bytes
# Longest Retry-After that is honoured, seconds: a wrong clock there must not divert traffic for a day.
MAX_RETRY_AFTER_S = 300.0
DEFAULT_RETRY_AFTER_S = 1.0  # used when an overloaded worker sends no Retry-After, seconds
# The same for a used-up quota. An operator must raise it, so trying every second would be useless.
QUOTA_RETRY_AFTER_S = 60.0
# The contract's names of fields: a worker's `param` is passed on only when it is one.
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}\Z")
# The gateway's name of a field that the pool sends under another name.
_GATEWAY_FIELDS: Mapping[str, str] = {
    "structured_outputs": "response_format",
    "max_completion_tokens": "max_tokens",
}
_TOO_LONG = (
    "context length",
    "maximum context",
    "max_model_len",
    "context_length_exceeded",
    "context_too_long",
    "context size",  # llama.cpp
    "`max_new_tokens` must be",  # Text Generation Inference
    "maximum number of tokens",  # Gemini
    "prompt is too long",
    "input is too long",  # Bedrock's path of OpenAI's contract
    "context window",  # OpenAI's responses, MiniMax
    "maximum prompt length",  # xAI
    "model token limit",  # Kimi
    "input length should be",  # DashScope
)
# Parts of a service's message that refuses the fields which dialect vllm adds.
_VLLM_FIELDS = ("cache_salt", "return_token_ids", "stream_interval", "continuous_usage_stats")
# The fields that vLLM refuses without naming them, by parts of its messages.
_UNNAMED: Mapping[str, str] = {
    "multimodal model": "messages",
    "may be provided in one prompt": "messages",
    "failed to load image": "messages",
    "thinking_token_budget is set but reasoning_config": "thinking_token_budget",
    "matryoshka": "dimensions",
    "supports dimensions in": "dimensions",
    "truncate_prompt_tokens value is": "truncate_prompt_tokens",
    "max_tokens_per_doc (": "max_tokens_per_doc",
    "max_tokens_per_query (": "max_tokens_per_query",
}
# Where texts are cut: too long a value is not too long a prompt.
_CUTS = ("truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query")
# The beginning of vLLM's message when its engine is dead, also while it stops: the server then ends too.
_ENGINE_DEAD = "enginecore encountered an issue"
# The beginning of llama-cpp-python's message, with status 500, for a body that it refuses.
_REFUSED_BODY = re.compile(r"\d+ validation errors?:\s+\{.*?'loc': \('body', '(\w+)'")
# A part of vLLM's message for tools when it was started without their options.
_NO_TOOLS = "--tool-call-parser"

_STATUS_OF_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "service_unavailable_error": 503,
    "serviceunavailableerror": 503,
}


class _Detail(msgspec.Struct):
    """A field that a server refuses, as FastAPI reports it."""

    loc: list[str | int] = []
    msg: str | None = None


class _Nested(msgspec.Struct):
    detail: list[_Detail] | str | None = None


class _Error(msgspec.Struct):
    message: str | list[_Detail] | _Nested | None = None  # Mistral's are no texts
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Body(_Error):
    error: _Error | str | None = None
    detail: _Error | list[_Detail] | str | None = None


# Gemini's is a list.
_decode_body = msgspec.json.Decoder(_Body | list[_Body]).decode
_decode_error = msgspec.json.Decoder(_Error).decode


async def refusal_of(connection: Connection, *, model: str, adapter: bool = False) -> BackendFailure:
    """Read the body of an answer with another status than 200; returns its failure. Raises TransportError."""
    body = await whole_body(connection, MAX_ERROR_BYTES)
    waits = map(connection.header, (b"retry-after", b"retry-after-ms", b"date"))
    return failure_of(connection.status, body, *waits, model=model, adapter=adapter)


def failure_of(
    status: int,
    body: bytes,
    retry_after: str,
    retry_after_ms: str = "",
    date: str = "",
    *,
    model: str,
    adapter: bool = False,
) -> BackendFailure:
    """The failure for an answer with an error status; ``model`` is the requested name, perhaps an adapter's.

    The worker's message is not passed on, since it may quote the prompt; its code and field name are. It is
    ``isolated`` if the worker asks for a pause, which keeps requests away: the circuit need not open.
    """
    if status == 403 and body.lstrip().startswith(b"<"):
        text = "a firewall in front of the worker refused the request with 403"
        return BackendFailure(FailureKind.ACCESS_DENIED, text, isolated=True)
    wait_s = _seconds(retry_after_ms, unit_s=0.001) if retry_after_ms else _seconds(retry_after, date)
    failure = _failure(status, _read(body), wait_s, model, "adapter_id" if adapter else None)
    if failure.kind is FailureKind.THROTTLED:
        failure.isolated = bool(retry_after or retry_after_ms) or failure.no_retry_here
    return failure


def failure_in_stream(error: bytes) -> BackendFailure:
    try:
        reported = _decode_error(error)
    except msgspec.DecodeError:
        reported = _Error()
    code = int(shown) if len(shown := str(reported.code)) == 3 and shown.isdecimal() else 0
    status = code if 400 <= code < 600 else _STATUS_OF_TYPE.get((reported.type or "").lower(), 500)
    return _failure(status, reported, None, None)


def failure_of_transport(error: TransportError, *, delivered: bool) -> BackendFailure:
    if isinstance(error, TimedOut):
        return BackendFailure(FailureKind.TIMEOUT, f"the worker is too slow: {error}")
    if delivered:
        return BackendFailure(FailureKind.STREAM_BROKEN, f"the worker's answer broke off: {error}")
    if isinstance(error, ConnectionsInUse):
        # Isolated: the gateway's own limit, while the worker answers as many requests as it allows.
        text, after_s = f"a worker is busy: {error}", DEFAULT_RETRY_AFTER_S
        return BackendFailure(FailureKind.THROTTLED, text, retry_after_s=after_s, isolated=True)
    if isinstance(error, ConnectFailed | BadHttp):
        what = "gave no usable answer" if isinstance(error, BadHttp) else "is unreachable"
        text = f"the worker {what}: {error}"
        if isinstance(error, ConnectFailed) and error.refused:
            text = "the worker refuses connections"
        return BackendFailure(FailureKind.BACKEND_UNAVAILABLE, text, retry_after_s=DEFAULT_RETRY_AFTER_S)
    return BackendFailure(FailureKind.STREAM_BROKEN, f"the worker broke off: {error}")


def _failure(
    status: int, reported: _Error, retry_after_s: float | None, model: str | None, missing: str | None = None
) -> BackendFailure:
    code = f" ({reported.code})" if isinstance(reported.code, str) and _FIELD.match(reported.code) else ""
    param = reported.param if reported.param is not None and _FIELD.match(reported.param) else None
    if param is not None:
        param = param.removeprefix("body.")  # vLLM's
        param = _GATEWAY_FIELDS.get(param.partition(".")[0], param)
    words = f"{reported.message} {reported.code}".lower()
    if status == 400 and "api key not valid" in words:  # Gemini
        status = 401
    if status == 500 and (refused := _REFUSED_BODY.match(words)):
        status, param = 400, refused[1]
    if status == 403 and "input was flagged" in words:  # OpenRouter
        return invalid_input("the worker's moderation refused the request", "messages")
    if status in (400, 422):
        if param is None:
            param = next((name for part, name in _UNNAMED.items() if part in words), None)
        if param not in _CUTS and any(sign in words for sign in _TOO_LONG):
            return BackendFailure(
                FailureKind.TOKEN_LIMIT_EXCEEDED, "prompt and answer are longer than the worker takes"
            )
        if any(name in words or name == reported.param for name in _VLLM_FIELDS):
            return invalid_input("the worker refuses vLLM's fields; set dialect: openai for its pool")
        if _NO_TOOLS in words:
            options = "--enable-auto-tool-choice and --tool-call-parser"
            return invalid_input(
                f"the worker takes no tools: its vLLM was started without {options}", "tools"
            )
        named = f": {param}" if param else ""
        hint = "; set max_tokens_field of its pool" if _refuses_limit_field(reported.param, words) else ""
        return invalid_input(f"the worker refused the request{named}{code}{hint}", param)
    if status == 413:
        return BackendFailure(FailureKind.TOKEN_LIMIT_EXCEEDED, "the request is larger than the worker takes")
    if status == 402 or (status == 429 and "insufficient_quota" in (reported.code, reported.type)):
        return BackendFailure(
            FailureKind.THROTTLED,
            f"the quota of the gateway's key at the worker is used up{code}; raise it there",
            retry_after_s=retry_after_s or QUOTA_RETRY_AFTER_S,
            no_retry_here=True,
        )
    if status == 500 and words.startswith(_ENGINE_DEAD):
        return BackendFailure(FailureKind.ENGINE_DEAD, "the worker's engine is dead")
    kind = kind_of_status(status)
    if 300 <= status < 400:
        text = f"the worker answered {status}, a redirect, which is not followed; correct base_urls"
        return BackendFailure(FailureKind.BACKEND_UNAVAILABLE, text, retry_after_s=DEFAULT_RETRY_AFTER_S)
    if kind is FailureKind.BACKEND_UNAVAILABLE and status not in (502, 503, 529):
        kind = FailureKind.INTERNAL
    text = f"the worker answered {status}{code}"
    if status == 429:
        text = f"the worker is throttling{code}"
    elif status == 503 and retry_after_s is not None:  # overload; a 503 without the header: out of service
        kind = FailureKind.THROTTLED
    elif kind is FailureKind.ACCESS_DENIED:
        text = f"the worker refused the gateway's key with {status}; check api_key_env or api_key_file"
    elif kind is FailureKind.MODEL_NOT_FOUND:
        requested = f" {model!r}" if model else " the model"
        text = f"the worker does not serve{requested}; check model and adapters"
    waits = kind in (FailureKind.THROTTLED, FailureKind.BACKEND_UNAVAILABLE)
    return BackendFailure(
        kind,
        text,
        retry_after_s=retry_after_s or DEFAULT_RETRY_AFTER_S if waits else None,
        param=missing if kind is FailureKind.MODEL_NOT_FOUND else None,
    )


def _refuses_limit_field(param: str | None, words: str) -> bool:
    """Whether the server does not know the field of the answer's limit, as opposed to its value."""
    unknown = "not permitted" in words or "unsupported parameter" in words
    return unknown and param in ("max_tokens", "max_completion_tokens")


def _read(body: bytes) -> _Error:
    try:
        reported = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Error()
    if isinstance(reported, list):
        reported = reported[0] if reported else _Body()
    found = reported.error or reported.detail or reported.message or None
    if isinstance(found, _Nested):
        found = found.detail or None
    if isinstance(found, list):  # has an entry, else it is false
        place = found[0].loc  # a deeper one also has names of the service's own types
        return _Error(found[0].msg, param=str(place[1]) if len(place) == 2 else None)
    if isinstance(found, str):
        return _Error(found, reported.type, reported.param, reported.code)
    return found if isinstance(found, _Error) else reported


def _seconds(value: str, date: str = "", unit_s: float = 1.0) -> float | None:
    """``Retry-After`` in seconds; ``value`` is a number of units of ``unit_s`` seconds, empty without it.

    A time counts from the answer's own ``date``, since the worker's clock may differ from ours; without one
    it gives the default.
    """
    try:
        seconds = float(value) * unit_s
    except ValueError:
        if email.utils.parsedate(value) is None:
            return None
        try:
            until, now = map(email.utils.parsedate_to_datetime, (value, date))
            seconds = (until - now).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return DEFAULT_RETRY_AFTER_S
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None
