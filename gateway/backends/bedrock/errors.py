"""Everything that boto3 raises, as the closed set of failures.

Messages name what happened and Bedrock's own code, and never its text, which may hold a part of the prompt or
the account's number; ``__cause__`` keeps the exception for the log.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.backends.bedrock.wire import WireCut
from resilience.classify_aws import aws_failure
from resilience.failures import BackendFailure, FailureKind

# Longest wait that a Retry-After header is believed, seconds.
MAX_RETRY_AFTER_S = 300.0


def failure_of(error: Exception, *, region: str, delivered: bool) -> BackendFailure:
    """The failure that ``error`` stands for.

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
    if isinstance(error, WireCut):
        return FailureKind.BACKEND_UNAVAILABLE, "the call was given up"
    failure = aws_failure(error, delivered=delivered)
    if failure is not None:
        return failure
    name = type(error).__name__
    if isinstance(error, OSError):
        kind = FailureKind.STREAM_BROKEN if delivered else FailureKind.BACKEND_UNAVAILABLE
        return kind, f"the connection broke ({name})"
    # What is left is an event stream that cannot be read: a frame of nonsense, no JSON.
    return FailureKind.STREAM_BROKEN, f"the answer cannot be read ({name})"


def _retry_after(error: Exception) -> float | None:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return None
    value = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    return min(float(value), MAX_RETRY_AFTER_S) if value.isascii() and value.isdigit() else None
