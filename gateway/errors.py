"""Errors that callers see, and the one table that turns every error into an HTTP answer.

The errors of the other packages are no subclasses of :class:`GatewayError`; :data:`LEAF_ERRORS` lists them.
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
    """What a caller receives: an HTTP status, a stable code, a message, the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None

    @property
    def retry_after_s(self) -> int | None:
        """Whole seconds, at least 1, for ``Retry-After``, which every 429 and 503 has."""
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
    """A field is missing, of the wrong type, out of range, or cannot be honoured."""


class InvalidJson(InvalidRequest, status=400, code="invalid_json"):
    """The body is not JSON."""


class GrammarTooComplex(GatewayError, status=400, code="grammar_too_complex"):
    """The shape that the answer must have is over a bound: of size, or of time or memory to compile."""


class UnknownPromptVersion(GatewayError, status=422, code="unknown_prompt_version"):
    """No prompt version of that id is registered."""


class NoSuchAdapter(GatewayError, status=404, code="unknown_adapter"):
    """An operator names a version or an alias that is not registered."""


class NoSuchKey(GatewayError, status=404, code="unknown_key"):
    """An admin names a key that was not made, or that is revoked."""


class MissingKey(GatewayError, status=401, code="missing_key"):
    """No key was sent."""


class InvalidKey(GatewayError, status=401, code="invalid_key"):
    """The key is unknown, expired or revoked."""


class Forbidden(GatewayError, status=403, code="forbidden"):
    """The key may not do this."""


class UnknownRoute(GatewayError, status=404, code="unknown_route"):
    """The routing config has no such route."""


class UnknownResponse(GatewayError, status=404, code="not_found"):
    """The tenant has stored no response of that id, or it has expired."""


class UnknownFile(GatewayError, status=404, code="not_found"):
    """The tenant has stored no file of that id, or it has expired."""


class UnknownBatch(GatewayError, status=404, code="not_found"):
    """The tenant has no batch of that id."""


class UnknownRequest(GatewayError, status=404, code="not_found"):
    """This process does not remember a request of that id."""


class UnknownModel(GatewayError, status=404, code="unknown_model"):
    """Neither a base model, nor an adapter, nor a backend has that name."""


class DuplicateRequest(GatewayError, status=409, code="duplicate_request"):
    """The tenant has a request of the same id in flight."""


class IdempotencyConflict(GatewayError, status=409, code="idempotency_conflict"):
    """The idempotency key was used with another body."""


class RevisionConflict(GatewayError, status=409, code="revision_conflict"):
    """Another routing revision came first."""


class FileInUse(GatewayError, status=409, code="file_in_use"):
    """A batch that has not ended reads the file."""


class WindowTooShort(GatewayError, status=409, code="window_too_short"):
    """A batch cannot be done in the time that its caller asks for."""


class BodyTooLarge(GatewayError, status=413, code="body_too_large"):
    """The body is over ``server.max_body_bytes``, or a file over its own bound."""


class RateLimited(GatewayError, status=429, code="rate_limited"):
    """The key's requests or tokens of a minute are used up."""


class QuotaExceeded(GatewayError, status=429, code="quota_exceeded"):
    """The key's tokens of a day are used up."""


class BudgetExceeded(GatewayError, status=429, code="budget_exceeded"):
    """The money of a day or a month is spent, the key's or its tenant's."""


class BackendUnavailable(GatewayError, status=503, code="backend_unavailable"):
    """No backend of the route can take the request."""


class Draining(GatewayError, status=503, code="draining"):
    """The gateway is stopping and takes nothing new."""


class DeadlineExceeded(GatewayError, status=504, code="deadline_exceeded"):
    """The caller's deadline passed before the first token."""


class Internal(GatewayError, status=500, code="internal"):
    """A defect of ours; the details are in the log under the request id."""


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))


def _refused(error: Refused) -> PublicError:
    code, why = error.reason.value, f"the gateway is busy: {error}"
    if error.reason is Reason.CIRCUIT_OPEN:
        code, why = (
            "backend_unavailable",
            "too many of the backend's last answers failed; it is asked again soon",
        )
    elif error.reason is Reason.WAIT_EXCEEDED:
        why = f"no answer is expected in time: {error}"
    elif error.reason is Reason.LOW_PRIORITY_SHED:
        code = "queue_full"
    return PublicError(503, code, why, retry_after_ms=_ms(error.retry_after_s))


_FAILURE_STATUS: Mapping[FailureKind, tuple[int, str]] = {
    FailureKind.INVALID_INPUT: (422, "invalid_request"),
    FailureKind.TOKEN_LIMIT_EXCEEDED: (422, "context_too_long"),
}


def _backend_failure(error: BackendFailure) -> PublicError:
    status, code = _FAILURE_STATUS.get(error.kind, (503, "backend_unavailable"))
    # The kind says where to look; what the caller got wrong needs no such word.
    message = str(error) if status < 500 else f"{error.kind.value}: {error}"
    return PublicError(status, code, message, error.param, retry_after_ms=_ms(error.retry_after_s))


# One row per error class of the leaves; a test walks the leaves' trees against it.
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
    """What the caller receives for ``error``; anything unknown is ``internal`` without a detail."""
    if isinstance(error, GatewayError):
        return PublicError(error.status, error.code, error.message, error.param, error.retry_after_ms)
    for cls in type(error).__mro__:
        tell = LEAF_ERRORS.get(cls)
        if tell is not None:
            return tell(error)
    return PublicError(500, "internal", "internal error; quote the request id to the operator")
