"""Maps any exception to the closed set of failures, by its type and message, without importing an engine."""

import re
from collections.abc import Mapping

from resilience.classify_aws import aws_failure, names_of
from resilience.failures import BackendFailure, FailureKind

# Classes that cannot be imported here, by package and name. The first of an exception's ancestors in this
# table decides, so the table may contain a base class and classes derived from it.
_BY_NAME: Mapping[str, FailureKind] = {
    "torch.OutOfMemoryError": FailureKind.CUDA_OOM,
    "torch.DistBackendError": FailureKind.CUDA_DRIVER_ERROR,
    "vllm.EngineDeadError": FailureKind.ENGINE_DEAD,
    "vllm.QueueOverflowError": FailureKind.THROTTLED,
    "vllm.MaxQueuedTokensError": FailureKind.THROTTLED,
    "vllm.RetryableRequestError": FailureKind.BACKEND_UNAVAILABLE,
    "vllm.VLLMNotFoundError": FailureKind.MODEL_NOT_FOUND,
    "vllm.VLLMClientError": FailureKind.INVALID_INPUT,
}
# Exceptions that wrap the real one (their ``__cause__``).
_WRAPPERS = frozenset({"vllm.EngineGenerateError"})
_CLIENT_ERROR_OF_VLLM = "vllm.VLLMClientError"

# Texts of PyTorch's runtime errors, lower case. Memory comes first: "CUDA error: out of memory" is an OOM,
# which is contained, and not a driver error, which costs a restart.
_BY_RUNTIME_MESSAGE: tuple[tuple[str, FailureKind], ...] = (
    ("out of memory", FailureKind.CUDA_OOM),
    ("defaultcpuallocator: ", FailureKind.CUDA_OOM),  # the host's memory, on machines without a GPU
    ("status_alloc_failed", FailureKind.CUDA_OOM),  # cuBLAS, cuDNN, hipBLAS
    ("memoryerror", FailureKind.CUDA_OOM),
    ("std::bad_alloc", FailureKind.CUDA_OOM),
    ("cannot allocate memory", FailureKind.CUDA_OOM),
    ("nans detected in logits", FailureKind.NAN_OUTPUT),  # vLLM with VLLM_RAISE_ON_LOGIT_NANS
    ("probability tensor contains either", FailureKind.NAN_OUTPUT),  # torch.multinomial
    ("cuda error", FailureKind.CUDA_DRIVER_ERROR),
    ("hip error", FailureKind.CUDA_DRIVER_ERROR),
    ("cudnn error", FailureKind.CUDA_DRIVER_ERROR),
    ("nccl error", FailureKind.CUDA_DRIVER_ERROR),
)
_DEVICE_ERROR = "torch.AcceleratorError"  # a class that only errors of the device have, whatever the text

# Parts of vLLM's message when it refuses a prompt as too long (lower case here).
_TOO_LONG = ("maximum model length", "maximum context length", "max_model_len")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}\Z")

_MESSAGES: Mapping[FailureKind, str] = {
    FailureKind.CUDA_OOM: "the backend ran out of memory",
    FailureKind.CUDA_DRIVER_ERROR: "the device or its driver failed",
    FailureKind.ENGINE_DEAD: "the engine is dead",
    FailureKind.NAN_OUTPUT: "the model computed something that is not a number",
    FailureKind.TIMEOUT: "the backend did not answer in time",
    FailureKind.THROTTLED: "the backend is busy",
    FailureKind.BACKEND_UNAVAILABLE: "the backend is away or out of service",
    FailureKind.STREAM_BROKEN: "the answer broke off",
    FailureKind.ACCESS_DENIED: "the backend refused the gateway's credentials",
    FailureKind.INVALID_INPUT: "the backend refused the request",
    FailureKind.MODEL_NOT_FOUND: "the backend does not have the model",
    FailureKind.TOKEN_LIMIT_EXCEEDED: "prompt and answer are longer than the backend takes",
    FailureKind.INTERNAL: "the backend failed in an unknown way",
}

MAX_GROUP_DEPTH = 8  # task groups do not nest deeper than this


def classify(error: Exception, *, delivered: bool = False) -> BackendFailure:
    """The failure that ``error`` means; a :class:`BackendFailure` is returned unchanged.

    A task group's :class:`ExceptionGroup` means the first known failure in it, since the others usually
    follow from that one. The message names the exception's class, never its text, which may contain a prompt;
    ``__cause__`` is the exception itself, for the log.

    Args:
        delivered: whether a part of the answer had arrived before the error.
    """
    return _classified(error, delivered, 0)


def _classified(error: Exception, delivered: bool, depth: int) -> BackendFailure:
    if isinstance(error, BackendFailure):
        return error
    if isinstance(error, ExceptionGroup) and depth < MAX_GROUP_DEPTH:
        found = [_classified(inner, delivered, depth + 1) for inner in error.exceptions]
        return next((one for one in found if one.kind is not FailureKind.INTERNAL), found[0])
    inner = error.__cause__
    if isinstance(inner, Exception) and depth < MAX_GROUP_DEPTH and not _WRAPPERS.isdisjoint(names_of(error)):
        return _classified(inner, delivered, depth + 1)
    kind = _kind(error, delivered)
    failure = BackendFailure(kind, f"{_MESSAGES[kind]} ({type(error).__name__})", param=_param(error, kind))
    failure.__cause__ = error
    return failure


def _kind(error: Exception, delivered: bool) -> FailureKind:
    aws = aws_failure(error, delivered=delivered)
    return (
        _by_name(error)
        or _by_runtime_message(error)
        or (aws[0] if aws is not None else None)
        or _by_class(error, delivered)
        or FailureKind.INTERNAL
    )


def _by_name(error: Exception) -> FailureKind | None:
    names = names_of(error)
    if _CLIENT_ERROR_OF_VLLM in names and any(sign in str(error).lower() for sign in _TOO_LONG):
        return FailureKind.TOKEN_LIMIT_EXCEEDED
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def _by_runtime_message(error: Exception) -> FailureKind | None:
    # Only runtime errors, as PyTorch raises them: another exception's text may be anything, even a prompt.
    if not isinstance(error, RuntimeError):
        return None
    known = kind_of_text(str(error))
    if known is None and _DEVICE_ERROR in names_of(error):
        return FailureKind.CUDA_DRIVER_ERROR
    return known


def kind_of_text(text: str) -> FailureKind | None:
    """The failure that an error text of PyTorch, CUDA or their allocators means; ``None``: unknown."""
    lowered = text.lower()
    return next((kind for sign, kind in _BY_RUNTIME_MESSAGE if sign in lowered), None)


def _by_class(error: Exception, delivered: bool) -> FailureKind | None:
    if isinstance(error, MemoryError):
        return FailureKind.CUDA_OOM
    if isinstance(error, TimeoutError):
        return FailureKind.TIMEOUT
    if isinstance(error, ConnectionError | EOFError):
        return FailureKind.STREAM_BROKEN if delivered else FailureKind.BACKEND_UNAVAILABLE
    return None


def _param(error: Exception, kind: FailureKind) -> str | None:
    """The field of the request that vLLM's refusal names, if it has the form of a field's name."""
    named = getattr(error, "parameter", None)
    wrong = kind is FailureKind.INVALID_INPUT and isinstance(named, str) and _FIELD.match(named)
    return named if wrong else None
