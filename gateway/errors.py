"""Errors that callers see, and their conversion to HTTP answers.

Errors of other packages are no subclasses of :class:`GatewayError`; the table :data:`LEAF_ERRORS` lists them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accounting.errors import LedgerUnavailable, NotRecorded
from adapters.catalogue import CatalogueError
from adapters.changes import NotEvaluatedError
from adapters.errors import AdapterForbidden, AdapterNotHere, AdapterRejected, UnknownAdapter
from admission.errors import Refused
from admission.values import Reason
from budgeting.errors import (
    ContextTooLong,
    EmptyPrompt,
    InvalidReserve,
    NoTokenizer,
    TemplateRefused,
    UnknownTokenId,
)
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure, FailureKind


@dataclass(frozen=True, slots=True)
class PublicError:
    """An error as callers receive it: HTTP status, stable code, message, and the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None

    @property
    def retry_after_s(self) -> int | None:
        """The value of ``Retry-After`` in whole seconds, at least 1; every 429 and 503 has one."""
        if self.retry_after_ms is None:
            return 1 if self.status in (429, 503) else None
        return max(1, math.ceil(self.retry_after_ms / 1000))


class GatewayError(Exception):
    """An error that the gateway itself raises; its subclasses have a status and a code."""

    status: ClassVar[int]
    code: ClassVar[str]

    def __init_subclass__(cls, *, status: int, code: str) -> None:
        cls.status, cls.code = status, code

    def __init__(self, message: str, *, param: str | None = None, retry_after_ms: int | None = None) -> None:
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        super().__init__(message)


class InvalidRequest(GatewayError, status=422, code="invalid_request"):
    """A field is missing, has a wrong type, is out of range, or asks for something unsupported."""


class InvalidJson(InvalidRequest, status=400, code="invalid_json"):
    """The body is not JSON."""


class GrammarTooComplex(GatewayError, status=400, code="grammar_too_complex"):
    """The answer's requested shape exceeds a bound: of its size, or of the time or memory to compile it."""


class UnknownPromptVersion(GatewayError, status=422, code="unknown_prompt_version"):
    """No prompt version of that id is registered."""


class NoSuchAdapter(GatewayError, status=404, code="unknown_adapter"):
    """An operator names a version or an alias that is not registered."""


class NoSuchKey(GatewayError, status=404, code="unknown_key"):
    """An admin's request names a key that does not exist or is revoked."""


class MissingKey(GatewayError, status=401, code="missing_key"):
    """No key was sent."""


class InvalidKey(GatewayError, status=401, code="invalid_key"):
    """The key is unknown, expired or revoked."""


class Forbidden(GatewayError, status=403, code="forbidden"):
    """The key may not do this."""


class UnknownRoute(GatewayError, status=404, code="unknown_route"):
    """The routing config has no such route."""


class NotFound(GatewayError, status=404, code="not_found"):
    """The tenant has nothing of that id, such as a stored response, a file or a batch, or it has expired."""


class UnknownModel(GatewayError, status=404, code="unknown_model"):
    """No model, adapter or backend of that name is served, or none that can do what the request needs."""


class DuplicateRequest(GatewayError, status=409, code="duplicate_request"):
    """The tenant has a request with the same id or idempotency key in flight."""


class IdempotencyConflict(GatewayError, status=409, code="idempotency_conflict"):
    """The idempotency key was used with another path or body."""


class RevisionConflict(GatewayError, status=409, code="revision_conflict"):
    """Another routing revision came first, or the canary's state does not allow the change."""


class FileInUse(GatewayError, status=409, code="file_in_use"):
    """A batch that has not ended reads the file."""


class WindowTooShort(GatewayError, status=409, code="window_too_short"):
    """A batch cannot be completed within the requested time."""


class BodyTooLarge(GatewayError, status=413, code="body_too_large"):
    """The body is over ``server.max_body_bytes``, or a file over its own bound."""


class RateLimited(GatewayError, status=429, code="rate_limited"):
    """A rate or concurrency limit is reached, such as the key's requests or tokens per minute."""


class QuotaExceeded(GatewayError, status=429, code="quota_exceeded"):
    """The key's tokens of a day, or the tenant's space for files or batches, are used up."""


class BudgetExceeded(GatewayError, status=429, code="budget_exceeded"):
    """The daily or monthly budget of the key or its tenant is spent."""


class BackendUnavailable(GatewayError, status=503, code="backend_unavailable"):
    """No backend of the route can take the request, or a store that the request needs is unavailable."""


class Draining(GatewayError, status=503, code="draining"):
    """The gateway is stopping and takes no new requests."""


class DeadlineExceeded(GatewayError, status=504, code="deadline_exceeded"):
    """The caller's deadline, or the gateway's time limit for a request, has passed."""


class Internal(GatewayError, status=500, code="internal"):
    """A defect of the gateway; the details are in the log under the request id."""


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))


def _refused(error: Refused) -> PublicError:
    code, why = error.reason.value, f"the gateway is busy: {error}"
    if error.reason is Reason.CIRCUIT_OPEN:
        code, why = (
            "backend_unavailable",
            "too many of the backend's last answers failed; it is tried again soon",
        )
    elif error.reason is Reason.WAIT_EXCEEDED:
        why = f"no answer is expected in time: {error}"
        if error.checked_s > error.estimated_wait_s:
            took = f"the check of its grammar took {error.checked_s * 1_000:.0f} ms"
            why += f"; {took}: use a simpler one, or a later deadline"
    elif error.reason is Reason.LOW_PRIORITY_SHED:
        code = "queue_full"
    return PublicError(503, code, why, retry_after_ms=_ms(error.retry_after_s))


_FAILURE_STATUS: Mapping[FailureKind, tuple[int, str]] = {
    FailureKind.INVALID_INPUT: (422, "invalid_request"),
    FailureKind.TOKEN_LIMIT_EXCEEDED: (422, "context_too_long"),
}


def _backend_failure(error: BackendFailure) -> PublicError:
    status, code = _FAILURE_STATUS.get(error.kind, (503, "backend_unavailable"))
    # The kind tells operators where to look; for a caller's own mistake it is left out.
    message = str(error) if status < 500 else f"{error.kind.value}: {error}"
    return PublicError(status, code, message, error.param, retry_after_ms=_ms(error.retry_after_s))


# One row per public error class of the other packages; a test checks that none is missing.
LEAF_ERRORS: Mapping[type[Exception], Callable[[Any], PublicError]] = {
    ContextTooLong: lambda e: PublicError(422, "context_too_long", str(e), "messages"),
    EmptyPrompt: lambda e: PublicError(422, "invalid_request", str(e), "prompt"),
    InvalidReserve: lambda e: PublicError(422, "invalid_request", str(e), "max_tokens"),
    NoTokenizer: lambda e: (
        PublicError(503, "backend_unavailable", str(e), retry_after_ms=1_000)
        if e.later
        else PublicError(422, "invalid_request", str(e), "prompt")
    ),
    TemplateRefused: lambda e: PublicError(422, "invalid_request", str(e), "messages"),
    UnknownTokenId: lambda e: PublicError(422, "invalid_request", str(e), "prompt"),
    UnknownAdapter: lambda e: PublicError(404, "unknown_adapter", str(e), e.param),
    AdapterForbidden: lambda e: PublicError(403, "forbidden", str(e), e.param),
    AdapterRejected: lambda e: PublicError(422, "adapter_rejected", str(e), "location"),
    AdapterNotHere: lambda e: PublicError(503, "adapter_not_here", str(e), "location"),
    CatalogueError: lambda e: PublicError(409, "adapter_conflict", str(e)),
    NotEvaluatedError: lambda e: PublicError(409, "not_evaluated", str(e)),
    Refused: _refused,
    LedgerUnavailable: lambda e: PublicError(503, "backend_unavailable", str(e), retry_after_ms=1_000),
    NotRecorded: lambda e: PublicError(503, "backend_unavailable", str(e), retry_after_ms=1_000),
    DeadlinePassed: lambda e: PublicError(504, "deadline_exceeded", "the deadline passed"),
    BackendFailure: _backend_failure,
}


def public_error(error: BaseException) -> PublicError:
    """The error that the caller receives for ``error``; an unknown one is ``internal`` without details."""
    if isinstance(error, GatewayError):
        return PublicError(error.status, error.code, error.message, error.param, error.retry_after_ms)
    for cls in type(error).__mro__:
        tell = LEAF_ERRORS.get(cls)
        if tell is not None:
            return tell(error)
    return PublicError(500, "internal", "internal error; quote the request id to the operator")
