"""From any exception to the closed set of failures, by its type and message, without importing an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from resilience.failures import BackendFailure, FailureKind

# Classes that cannot be imported here, by name, searched through an exception's whole line of ancestors.
_BY_CLASS_NAME: Mapping[str, FailureKind] = MappingProxyType(
    {
        "OutOfMemoryError": FailureKind.CUDA_OOM,  # torch
        "EngineDeadError": FailureKind.ENGINE_DEAD,  # vLLM
    }
)

# Texts of PyTorch's runtime errors, lower case. Memory comes first: "CUDA error: out of memory" is an OOM,
# which is contained, and not a driver error, which costs a restart.
_BY_RUNTIME_MESSAGE: tuple[tuple[str, FailureKind], ...] = (
    ("out of memory", FailureKind.CUDA_OOM),
    ("defaultcpuallocator: ", FailureKind.CUDA_OOM),  # the host's memory, on machines without a GPU
    ("cublas_status_alloc_failed", FailureKind.CUDA_OOM),
    ("cuda error", FailureKind.CUDA_DRIVER_ERROR),
    ("cudnn error", FailureKind.CUDA_DRIVER_ERROR),
    ("nccl error", FailureKind.CUDA_DRIVER_ERROR),
)

_BY_CLASS: tuple[tuple[type[Exception], FailureKind], ...] = (
    (MemoryError, FailureKind.CUDA_OOM),
    (TimeoutError, FailureKind.TIMEOUT),
    (ConnectionError, FailureKind.BACKEND_UNAVAILABLE),
    (EOFError, FailureKind.BACKEND_UNAVAILABLE),
)

_TOLD: Mapping[FailureKind, str] = MappingProxyType(
    {
        FailureKind.CUDA_OOM: "the backend ran out of memory",
        FailureKind.CUDA_DRIVER_ERROR: "the device or its driver failed",
        FailureKind.ENGINE_DEAD: "the engine is dead",
        FailureKind.TIMEOUT: "the backend did not answer in time",
        FailureKind.BACKEND_UNAVAILABLE: "the connection to the backend is gone",
        FailureKind.INTERNAL: "the backend failed in an unknown way",
    }
)

# A group inside a group inside a group is no task group's doing any more.
MAX_GROUP_DEPTH = 8


def classify(error: Exception) -> BackendFailure:
    """The failure that ``error`` stands for; a :class:`BackendFailure` is returned as it is.

    A task group's :class:`ExceptionGroup` stands for the first failure in it that is known, since the
    others usually follow from it. The message names the exception's class and never repeats its text,
    which may hold a prompt; ``__cause__`` keeps the exception itself for the log.
    """
    return _classified(error, 0)


def _classified(error: Exception, depth: int) -> BackendFailure:
    if isinstance(error, BackendFailure):
        return error
    if isinstance(error, ExceptionGroup) and depth < MAX_GROUP_DEPTH:
        found = [_classified(inner, depth + 1) for inner in error.exceptions]
        return next((one for one in found if one.kind is not FailureKind.INTERNAL), found[0])
    kind = _kind(error)
    failure = BackendFailure(kind, f"{_TOLD[kind]} ({type(error).__name__})")
    failure.__cause__ = error
    return failure


def _kind(error: Exception) -> FailureKind:
    for ask in _QUESTIONS:
        kind = ask(error)
        if kind is not None:
            return kind
    return FailureKind.INTERNAL


def _by_class_name(error: Exception) -> FailureKind | None:
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_CLASS_NAME:
            return _BY_CLASS_NAME[cls.__name__]
    return None


def _by_runtime_message(error: Exception) -> FailureKind | None:
    # Only runtime errors, as PyTorch raises them: another exception's text may be anything, a prompt too.
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).lower()
    return next((kind for sign, kind in _BY_RUNTIME_MESSAGE if sign in text), None)


def _by_class(error: Exception) -> FailureKind | None:
    return next((kind for cls, kind in _BY_CLASS if isinstance(error, cls)), None)


_QUESTIONS: tuple[Callable[[Exception], FailureKind | None], ...] = (
    _by_class_name,
    _by_runtime_message,
    _by_class,
)
