"""Everything that boto3 raises, as the closed set of failures.

Messages name what happened and Bedrock's own code, and never its text, which may hold a part of the prompt or
the account's number; ``__cause__`` keeps the exception for the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.backends.bedrock.wire import WireCut
from resilience.failures import BackendFailure, FailureKind

# Longest wait that a Retry-After header is believed, seconds.
MAX_RETRY_AFTER_S = 300.0

# Bedrock's and the signature check's codes. In streams they begin with a small letter.
_CODES: Mapping[str, FailureKind] = MappingProxyType(
    {
        "ThrottlingException": FailureKind.THROTTLED,
        "TooManyRequestsException": FailureKind.THROTTLED,
        "ServiceQuotaExceededException": FailureKind.THROTTLED,
        "ModelTimeoutException": FailureKind.TIMEOUT,
        "ModelNotReadyException": FailureKind.BACKEND_UNAVAILABLE,
        "ModelErrorException": FailureKind.BACKEND_UNAVAILABLE,
        "ModelStreamErrorException": FailureKind.STREAM_BROKEN,
        "InternalServerException": FailureKind.BACKEND_UNAVAILABLE,
        "ServiceUnavailableException": FailureKind.BACKEND_UNAVAILABLE,
        "ResourceNotFoundException": FailureKind.MODEL_NOT_FOUND,
        "AccessDeniedException": FailureKind.BACKEND_UNAVAILABLE,
        "UnrecognizedClientException": FailureKind.BACKEND_UNAVAILABLE,
        "InvalidSignatureException": FailureKind.BACKEND_UNAVAILABLE,
        "ExpiredTokenException": FailureKind.BACKEND_UNAVAILABLE,
    }
)
_ACCESS = frozenset(
    {
        "AccessDeniedException",
        "UnrecognizedClientException",
        "InvalidSignatureException",
        "ExpiredTokenException",
    }
)

# What a ValidationException is about shows only in its text (lower case here).
_TOO_LONG = (
    "input is too long",
    "prompt is too long",
    "too many input tokens",
    "context length",
    "context window",
    "context limit",
)
_NO_MODEL = ("model identifier is invalid", "on-demand throughput isn")


def failure_of(error: Exception, *, region: str, delivered: bool) -> BackendFailure:
    """The failure that ``error`` stands for. Imports botocore: only in threads.

    Args:
        error: what boto3, botocore or urllib3 raised.
        region: where, for the message.
        delivered: whether some of the answer's text had come; what breaks then is a stream.
    """
    if isinstance(error, BackendFailure):
        return error
    kind, text = _told(error, delivered)
    failure = BackendFailure(kind, f"Bedrock in {region}: {text}", retry_after_s=_retry_after(error))
    failure.__cause__ = error
    return failure


def _told(error: Exception, delivered: bool) -> tuple[FailureKind, str]:
    from botocore import exceptions as aws
    from urllib3.exceptions import HTTPError, ReadTimeoutError

    name = type(error).__name__
    broken = FailureKind.STREAM_BROKEN if delivered else FailureKind.BACKEND_UNAVAILABLE
    if isinstance(error, WireCut):
        return FailureKind.BACKEND_UNAVAILABLE, "the call was given up"
    if isinstance(error, aws.ClientError):
        return _of_code(error.response)
    if isinstance(error, aws.ReadTimeoutError | ReadTimeoutError):
        return FailureKind.TIMEOUT, "nothing came within read_timeout_seconds"
    if isinstance(
        error,
        aws.NoCredentialsError
        | aws.PartialCredentialsError
        | aws.CredentialRetrievalError
        | aws.NoAuthTokenError
        | aws.TokenRetrievalError
        | aws.ProfileNotFound,
    ):
        return FailureKind.BACKEND_UNAVAILABLE, f"no usable credentials ({name})"
    if isinstance(
        error, aws.EndpointConnectionError | aws.ConnectTimeoutError | aws.SSLError | aws.ProxyConnectionError
    ):
        return FailureKind.BACKEND_UNAVAILABLE, f"no connection ({name})"
    if isinstance(error, aws.HTTPClientError | HTTPError | OSError):
        return broken, f"the connection broke ({name})"
    if isinstance(error, aws.BotoCoreError):
        return FailureKind.INTERNAL, f"boto3 refused the call ({name})"
    # What is left is an event stream that cannot be read: a wrong checksum, a frame of nonsense, no JSON.
    return FailureKind.STREAM_BROKEN, f"the answer cannot be read ({name})"


def _of_code(response: Mapping[str, Any]) -> tuple[FailureKind, str]:
    error = response.get("Error", {})
    code = str(error.get("Code", ""))
    code = code[:1].upper() + code[1:]
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "ValidationException":
        text = str(error.get("Message", "")).lower()
        if any(sign in text for sign in _TOO_LONG):
            return FailureKind.TOKEN_LIMIT_EXCEEDED, "the prompt is longer than the model takes"
        if any(sign in text for sign in _NO_MODEL):
            return FailureKind.MODEL_NOT_FOUND, "there is no such model, or only by an inference profile"
        return FailureKind.INVALID_INPUT, "it refused the request (ValidationException)"
    if code in _ACCESS:
        return _CODES[code], f"access denied ({code}): see `sluice doctor`"
    if code in _CODES:
        return _CODES[code], f"it answered {code}"
    return _of_status(status), f"it answered {_shown(code)} (HTTP {status})"


def _of_status(status: int) -> FailureKind:
    if status == 429:
        return FailureKind.THROTTLED
    if status in (408, 504):
        return FailureKind.TIMEOUT
    if status == 404:
        return FailureKind.MODEL_NOT_FOUND
    if status in (401, 403) or status >= 500:
        return FailureKind.BACKEND_UNAVAILABLE
    return FailureKind.INTERNAL


def _retry_after(error: Exception) -> float | None:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return None
    told = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    return min(float(told), MAX_RETRY_AFTER_S) if told.isascii() and told.isdigit() else None


def _shown(code: str) -> str:
    """A code that is safe to print."""
    return code if code.isalnum() and len(code) <= 64 else "an unknown code"
