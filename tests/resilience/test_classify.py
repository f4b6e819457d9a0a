"""Classification: every exception becomes a failure of the closed set, and its text is not repeated."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import boto3
import botocore.eventstream
import botocore.exceptions as aws
import pytest
import torch
import torch.distributed
import urllib3.exceptions
from hypothesis import given
from hypothesis import strategies as st

from resilience.classify import classify
from resilience.failures import BackendFailure, FailureKind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), FailureKind.CUDA_OOM),
        (RuntimeError("CUDA error: out of memory"), FailureKind.CUDA_OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), FailureKind.CUDA_OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), FailureKind.CUDA_OOM),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("CUDA error: device-side assert triggered"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("HIP error: the operation cannot be performed"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("NCCL error in: x, unhandled cuda error"), FailureKind.CUDA_DRIVER_ERROR),
        (RuntimeError("NaNs detected in logits: {'a': 3}"), FailureKind.NAN_OUTPUT),
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


@pytest.mark.parametrize("error", [ConnectionResetError(), EOFError()])
def test_a_connection_that_breaks_is_a_broken_stream_once_something_was_delivered(error: Exception) -> None:
    assert classify(error).kind is FailureKind.BACKEND_UNAVAILABLE
    assert classify(error, delivered=True).kind is FailureKind.STREAM_BROKEN


# PyTorch


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_real_exceptions_of_pytorch_are_known() -> None:
    assert classify(torch.OutOfMemoryError("CUDA out of memory.")).kind is FailureKind.CUDA_OOM
    launch = torch.AcceleratorError("CUDA error: unspecified launch failure")
    assert classify(launch).kind is FailureKind.CUDA_DRIVER_ERROR
    assert classify(torch.AcceleratorError("CUDA error: out of memory")).kind is FailureKind.CUDA_OOM
    assert classify(torch.AcceleratorError("words of a new device")).kind is FailureKind.CUDA_DRIVER_ERROR
    peer_gone = torch.distributed.DistBackendError("NCCL watchdog")
    assert classify(peer_gone).kind is FailureKind.CUDA_DRIVER_ERROR
    petabyte = raised(lambda: torch.empty(2**48))
    assert classify(petabyte).kind is FailureKind.CUDA_OOM
    not_a_number = raised(lambda: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1))
    assert classify(not_a_number).kind is FailureKind.NAN_OUTPUT
    defect = raised(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))
    assert classify(defect).kind is FailureKind.INTERNAL


# vLLM


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """vLLM's exception modules without the package, whose import takes six seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    try:
        sys.modules["vllm"] = ModuleType("vllm")
        loaded = {
            name: _load(name, folder.joinpath(*name.split(".")[1:]).with_suffix(".py"))
            for name in ("vllm.exceptions", "vllm.v1.engine.exceptions")
        }
    finally:
        for name in ("vllm", "vllm.exceptions", "vllm.v1.engine.exceptions"):
            sys.modules.pop(name, None)
        sys.modules.update(before)
    return SimpleNamespace(
        **{key: value for module in loaded.values() for key, value in vars(module).items()}
    )


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_real_exceptions_of_vllm_are_known(vllm: SimpleNamespace) -> None:
    assert vllm.EngineDeadError.__module__ == "vllm.v1.engine.exceptions"
    for error, kind in (
        (vllm.EngineDeadError(), FailureKind.ENGINE_DEAD),
        (vllm.QueueOverflowError(), FailureKind.THROTTLED),
        (vllm.MaxQueuedTokensError(), FailureKind.THROTTLED),
        (vllm.RetryableRequestError(), FailureKind.BACKEND_UNAVAILABLE),
        (vllm.LoRAAdapterNotFoundError("a", "/a"), FailureKind.MODEL_NOT_FOUND),
        (vllm.VLLMValidationError("wrong"), FailureKind.INVALID_INPUT),
        (
            vllm.VLLMValidationError("the prompt is longer than the maximum model length of 64"),
            FailureKind.TOKEN_LIMIT_EXCEEDED,
        ),
        (vllm.GenerationError(), FailureKind.INTERNAL),
        (vllm.EngineGenerateError(), FailureKind.INTERNAL),
    ):
        assert classify(error).kind is kind, error


def test_vllms_wrapper_stands_for_what_it_was_raised_from(vllm: SimpleNamespace) -> None:
    error = vllm.EngineGenerateError()
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert classify(error).kind is FailureKind.CUDA_OOM


def test_the_field_that_vllm_names_is_passed_on_when_it_is_one(vllm: SimpleNamespace) -> None:
    assert classify(vllm.VLLMValidationError("wrong", parameter="top_k", value=-3)).param == "top_k"
    quoted = classify(vllm.VLLMValidationError("wrong", parameter="my secret prompt", value="secret"))
    assert quoted.param is None and "secret" not in str(quoted)


# botocore, with the exceptions of the service's own model

BEDROCK = {
    "AccessDeniedException": FailureKind.ACCESS_DENIED,
    "InternalServerException": FailureKind.BACKEND_UNAVAILABLE,
    "ModelErrorException": FailureKind.BACKEND_UNAVAILABLE,
    "ModelNotReadyException": FailureKind.BACKEND_UNAVAILABLE,
    "ModelTimeoutException": FailureKind.TIMEOUT,
    "ResourceNotFoundException": FailureKind.MODEL_NOT_FOUND,
    "ServiceUnavailableException": FailureKind.BACKEND_UNAVAILABLE,
    "ThrottlingException": FailureKind.THROTTLED,
    "ValidationException": FailureKind.INVALID_INPUT,
}


def test_every_error_that_bedrocks_model_names_for_a_conversation_is_known() -> None:
    client = boto3.client(
        "bedrock-runtime", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )
    model = client.meta.service_model
    for operation in ("Converse", "ConverseStream"):
        codes = {shape.name for shape in model.operation_model(operation).error_shapes}
        assert codes == set(BEDROCK)
        for code in codes:
            error = getattr(client.exceptions, code)({"Error": {"Code": code, "Message": "no"}}, operation)
            assert isinstance(error, aws.ClientError)
            assert classify(error).kind is BEDROCK[code], code
    stream = model.operation_model("ConverseStream").output_shape.members["stream"]
    for name, member in stream.members.items():
        if member.metadata.get("exception"):
            error = aws.EventStreamError({"Error": {"Code": name, "Message": "no"}}, "ConverseStream")
            assert classify(error, delivered=True).kind is not FailureKind.INTERNAL, name


def client_error(code: str, message: str = "no", status: int = 400) -> aws.ClientError:
    return aws.ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "Converse",
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (client_error("ServiceQuotaExceededException"), FailureKind.THROTTLED),
        (client_error("Throttling"), FailureKind.THROTTLED),
        (client_error("IDPCommunicationError"), FailureKind.BACKEND_UNAVAILABLE),
        (client_error("ExpiredTokenException", status=403), FailureKind.ACCESS_DENIED),
        (client_error("UnrecognizedClientException", status=403), FailureKind.ACCESS_DENIED),
        (client_error("SomethingNew", status=502), FailureKind.BACKEND_UNAVAILABLE),
        (client_error("SomethingNew", status=429), FailureKind.THROTTLED),
        (client_error("SomethingNew", status=403), FailureKind.ACCESS_DENIED),
        (client_error("SomethingNew", status=400), FailureKind.INTERNAL),
        (
            client_error("ValidationException", "Input is too long for requested model."),
            FailureKind.TOKEN_LIMIT_EXCEEDED,
        ),
        (
            client_error("ValidationException", "The provided model identifier is invalid."),
            FailureKind.MODEL_NOT_FOUND,
        ),
        (
            client_error(
                "ValidationException",
                "The guardrail identifier or version provided in the request does not exist.",
            ),
            FailureKind.ACCESS_DENIED,
        ),
        (aws.ReadTimeoutError(endpoint_url="u"), FailureKind.TIMEOUT),
        (aws.ConnectTimeoutError(endpoint_url="u"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.EndpointConnectionError(endpoint_url="u"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.SSLError(endpoint_url="u", error="e"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.ProxyConnectionError(proxy_url="u"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.ConnectionClosedError(endpoint_url="u"), FailureKind.BACKEND_UNAVAILABLE),
        (aws.NoCredentialsError(), FailureKind.ACCESS_DENIED),
        (aws.PartialCredentialsError(provider="env", cred_var="x"), FailureKind.ACCESS_DENIED),
        (aws.ProfileNotFound(profile="x"), FailureKind.ACCESS_DENIED),
        (aws.UnauthorizedSSOTokenError(), FailureKind.ACCESS_DENIED),
        (aws.ConfigNotFound(path="p"), FailureKind.ACCESS_DENIED),
        (aws.ConfigParseError(path="p", error="e"), FailureKind.ACCESS_DENIED),
        (aws.InfiniteLoopConfigError(source_profile="x", visited_profiles=[]), FailureKind.ACCESS_DENIED),
        (aws.ParamValidationError(report="r"), FailureKind.INTERNAL),
        (aws.NoRegionError(), FailureKind.INTERNAL),
        (aws.IncompleteReadError(actual_bytes=1, expected_bytes=2), FailureKind.STREAM_BROKEN),
        (botocore.eventstream.ChecksumMismatch(1, 2), FailureKind.STREAM_BROKEN),
        (urllib3.exceptions.ProtocolError("cut"), FailureKind.BACKEND_UNAVAILABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_real_exceptions_of_botocore_are_known(error: Exception, kind: FailureKind) -> None:
    failure = classify(error)
    assert failure.kind is kind
    assert failure.__cause__ is error
    if kind is FailureKind.BACKEND_UNAVAILABLE and isinstance(error, aws.ConnectionClosedError):
        assert classify(error, delivered=True).kind is FailureKind.STREAM_BROKEN


# Any exception


def test_a_class_of_the_same_name_from_elsewhere_is_not_taken_for_the_librarys() -> None:
    class EngineDeadError(Exception):
        """Has the name of vLLM's exception."""

    assert classify(EngineDeadError()).kind is FailureKind.INTERNAL


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
