"""A worker's refusals and failures in the gateway's closed set."""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from gateway.backends.workers.errors import (
    BadHttp,
    ConnectFailed,
    ConnectionsInUse,
    TimedOut,
    TransportError,
)
from resilience.failures import BackendFailure, FailureKind

# Bounds of what a worker may ask for, seconds: a wrong clock there must not keep traffic away for a day.
MAX_RETRY_AFTER_S = 300.0
# When a worker that is overloaded does not say when it will not be.
DEFAULT_RETRY_AFTER_S = 1.0
# The contract's names of fields: a worker's `param` is passed on only when it is one.
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}\Z")
# Fields that the pool writes for what the house calls by another name.
_WRITTEN_FOR: Mapping[str, str] = MappingProxyType(
    {"structured_outputs": "response_format", "max_completion_tokens": "max_tokens"}
)
_TOO_LONG = (
    "context length",
    "maximum context",
    "max_model_len",
    "context_length_exceeded",
    "context_too_long",
)

_STATUS_OF_TYPE: Mapping[str, int] = MappingProxyType(
    {
        "invalid_request_error": 400,
        "badrequesterror": 400,
        "authentication_error": 401,
        "permission_error": 403,
        "not_found_error": 404,
        "notfounderror": 404,
        "rate_limit_error": 429,
        "service_unavailable_error": 503,
        "serviceunavailableerror": 503,
    }
)


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Body(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_error = msgspec.json.Decoder(_Error).decode


def failure_of(
    status: int, body: bytes, retry_after: str | None, *, model: str, adapter: bool = False
) -> BackendFailure:
    """What an answer with an error status means.

    The worker's own words are not passed on: it may quote the prompt. Its code and the field it names are.

    Args:
        status: the HTTP status.
        body: the answer's body.
        retry_after: the header, if it came.
        model: the name that was asked for.
        adapter: whether that is an adapter's.
    """
    return _failure(status, _read(body), _seconds(retry_after), model, "adapter_id" if adapter else None)


def failure_in_stream(error: bytes) -> BackendFailure:
    """What an error object inside a stream means."""
    try:
        told = _decode_error(error)
    except msgspec.DecodeError:
        told = _Error()
    code = told.code if isinstance(told.code, int) else 0
    status = code if 400 <= code < 600 else _STATUS_OF_TYPE.get((told.type or "").lower(), 500)
    return _failure(status, told, None, None)


def failure_of_transport(error: TransportError, *, delivered: bool) -> BackendFailure:
    """What no answer, or half of one, means."""
    if isinstance(error, TimedOut):
        return BackendFailure(FailureKind.TIMEOUT, f"the worker did not answer in time: {error}")
    if delivered:
        return BackendFailure(FailureKind.STREAM_BROKEN, f"the worker's answer broke off: {error}")
    if isinstance(error, ConnectionsInUse):
        return BackendFailure(
            FailureKind.THROTTLED, f"a worker is busy: {error}", retry_after_s=DEFAULT_RETRY_AFTER_S
        )
    what = "answered nothing usable" if isinstance(error, BadHttp) else "is away"
    if isinstance(error, ConnectFailed | BadHttp):
        return BackendFailure(
            FailureKind.BACKEND_UNAVAILABLE,
            f"the worker {what}: {error}",
            retry_after_s=DEFAULT_RETRY_AFTER_S,
        )
    return BackendFailure(FailureKind.STREAM_BROKEN, f"the worker broke off: {error}")


def _failure(
    status: int, told: _Error, retry_after_s: float | None, model: str | None, missing: str | None = None
) -> BackendFailure:
    code = f" ({told.code})" if isinstance(told.code, str) and _FIELD.match(told.code) else ""
    param = told.param if told.param is not None and _FIELD.match(told.param) else None
    if param is not None:
        param = _WRITTEN_FOR.get(param.partition(".")[0], param)
    if status in (400, 422):
        words = f"{told.message} {told.code}".lower()
        if any(sign in words for sign in _TOO_LONG):
            return BackendFailure(
                FailureKind.TOKEN_LIMIT_EXCEEDED, "prompt and answer are longer than the worker takes"
            )
        named = f": {param}" if param else ""
        return BackendFailure(
            FailureKind.INVALID_INPUT, f"the worker refused the request{named}{code}", param=param
        )
    if status in (401, 403):
        return BackendFailure(
            FailureKind.ACCESS_DENIED,
            f"the worker refused the gateway's key with {status}; check the variable that api_key_env names",
        )
    if status == 404:
        asked = f" {model!r}" if model else " the model"
        return BackendFailure(
            FailureKind.MODEL_NOT_FOUND,
            f"the worker does not serve{asked}; check model and adapters",
            param=missing,
        )
    if status == 413:
        return BackendFailure(FailureKind.TOKEN_LIMIT_EXCEEDED, "the request is larger than the worker takes")
    if status == 429:
        return BackendFailure(
            FailureKind.THROTTLED,
            f"the worker is throttling{code}",
            retry_after_s=retry_after_s or DEFAULT_RETRY_AFTER_S,
        )
    if status == 503:
        # With a time to come back it is overload, without one it is out of service.
        kind = FailureKind.BACKEND_UNAVAILABLE if retry_after_s is None else FailureKind.THROTTLED
        return BackendFailure(
            kind, f"the worker answered 503{code}", retry_after_s=retry_after_s or DEFAULT_RETRY_AFTER_S
        )
    if status in (408, 504):
        return BackendFailure(FailureKind.TIMEOUT, f"the worker answered {status}{code}")
    if status in (502, 529):
        return BackendFailure(
            FailureKind.BACKEND_UNAVAILABLE,
            f"the worker answered {status}{code}",
            retry_after_s=retry_after_s or DEFAULT_RETRY_AFTER_S,
        )
    return BackendFailure(FailureKind.INTERNAL, f"the worker answered {status}{code}")


def _read(body: bytes) -> _Error:
    try:
        told = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Error()
    if isinstance(told.error, _Error):
        return told.error
    return _Error(told.message, told.type, told.param, told.code)


def _seconds(value: str | None) -> float | None:
    """``Retry-After``: seconds, or a date that is taken from now as the worker's clock is not ours."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        # A date needs two clocks to agree; that it came at all says "soon".
        return DEFAULT_RETRY_AFTER_S if email.utils.parsedate(value) else None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None
