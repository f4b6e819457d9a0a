"""The embedded engine's errors in the gateway's terms."""

from collections.abc import Mapping

from engine import errors
from gateway.contracts.values import Sampling
from resilience.failures import BackendFailure, FailureKind

# The failure kind of each stable error code of the engine; any other code is ``internal``.
_KINDS: Mapping[str, FailureKind] = {
    "nan_output": FailureKind.NAN_OUTPUT,
    "out_of_memory": FailureKind.CUDA_OOM,
    errors.EngineDead.code: FailureKind.ENGINE_DEAD,
    errors.PromptTooLong.code: FailureKind.TOKEN_LIMIT_EXCEEDED,
    errors.NoPromptTokens.code: FailureKind.INVALID_INPUT,
    errors.UnknownToken.code: FailureKind.INVALID_INPUT,
    errors.InvalidSampling.code: FailureKind.INVALID_INPUT,
    errors.InvalidGrammar.code: FailureKind.INVALID_INPUT,
    errors.EngineBusy.code: FailureKind.THROTTLED,
    errors.NoAdapterRoom.code: FailureKind.THROTTLED,
    errors.AdapterNotFound.code: FailureKind.MODEL_NOT_FOUND,
    errors.AdapterUnreadable.code: FailureKind.MODEL_NOT_FOUND,
    errors.AdapterUnsupported.code: FailureKind.MODEL_NOT_FOUND,
    errors.AdapterMismatch.code: FailureKind.MODEL_NOT_FOUND,
    errors.RequestedAdapterMissing.code: FailureKind.MODEL_NOT_FOUND,
}


def failure_of(code: str, message: str | None = None) -> BackendFailure:
    kind = _KINDS.get(code, FailureKind.INTERNAL)
    return BackendFailure(kind, message or f"the engine reported {code}", param=_param(code, message or ""))


def _param(code: str, message: str) -> str | None:
    """The field at fault; the engine's messages on sampling begin with the field's name."""
    if code == errors.InvalidGrammar.code:
        return "response_format"
    first = message.partition(" ")[0]
    return first if code == errors.InvalidSampling.code and first in Sampling.__struct_fields__ else None
