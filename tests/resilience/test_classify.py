"""Classification: every exception becomes one of the closed set, and its text goes nowhere."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resilience.classify import classify
from resilience.failures import POLICIES, BackendFailure, FailureKind


class OutOfMemoryError(RuntimeError):
    """Named like PyTorch's."""


class EngineDeadError(Exception):
    """Named like vLLM's."""


class OurOutOfMemory(OutOfMemoryError):
    """A subclass of it."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), FailureKind.CUDA_OOM),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), FailureKind.CUDA_OOM),
        (OurOutOfMemory(), FailureKind.CUDA_OOM),
        (RuntimeError("CUDA error: out of memory"), FailureKind.CUDA_OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), FailureKind.CUDA_OOM),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("NCCL error in: x, unhandled cuda error"), FailureKind.CUDA_DRIVER_ERROR),
        (EngineDeadError(), FailureKind.ENGINE_DEAD),
        (TimeoutError(), FailureKind.TIMEOUT),
        (ConnectionResetError(), FailureKind.BACKEND_UNAVAILABLE),
        (BrokenPipeError(), FailureKind.BACKEND_UNAVAILABLE),
        (EOFError(), FailureKind.BACKEND_UNAVAILABLE),
        (asyncio.IncompleteReadError(b"", 4), FailureKind.BACKEND_UNAVAILABLE),
        (RuntimeError("something else"), FailureKind.INTERNAL),
        (ValueError("CUDA error: the user's own words"), FailureKind.INTERNAL),
        (OSError(), FailureKind.INTERNAL),
    ],
)
def test_an_exception_is_known_by_its_type_or_its_runtime_message(
    error: Exception, kind: FailureKind
) -> None:
    assert classify(error).kind is kind


def test_real_exceptions_of_pytorch_are_known() -> None:
    assert classify(torch.OutOfMemoryError("CUDA out of memory.")).kind is FailureKind.CUDA_OOM
    assert classify(torch.AcceleratorError("CUDA error: unspecified launch failure")).kind is (
        FailureKind.CUDA_DRIVER_ERROR
    )
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48)  # a petabyte
    assert classify(caught.value).kind is FailureKind.CUDA_OOM


def test_a_backend_failure_stays_the_very_object() -> None:
    failure = BackendFailure(FailureKind.THROTTLED, "slow down", retry_after_s=3.0)
    assert classify(failure) is failure


def test_a_task_groups_error_stands_for_the_first_known_failure_in_it() -> None:
    group = ExceptionGroup("x", [ValueError(), ExceptionGroup("y", [ConnectionResetError()]), TimeoutError()])
    assert classify(group).kind is FailureKind.BACKEND_UNAVAILABLE
    assert classify(ExceptionGroup("x", [ValueError()])).kind is FailureKind.INTERNAL


def test_a_group_nested_without_end_is_internal() -> None:
    error: Exception = TimeoutError()
    for _ in range(500):
        error = ExceptionGroup("x", [error])
    assert classify(error).kind is FailureKind.INTERNAL


@given(st.text())
def test_the_exceptions_text_is_not_repeated_but_the_exception_is_kept(text: str) -> None:
    error = RuntimeError(f"secret {text}")
    failure = classify(error)
    assert "secret" not in str(failure)
    assert "RuntimeError" in str(failure)
    assert failure.__cause__ is error


def test_every_kind_has_a_policy() -> None:
    assert set(POLICIES) == set(FailureKind)
