"""SageMaker's paths: ``/invocations`` takes the native request; ``/ping`` is among the monitors."""

from __future__ import annotations

from gateway.contracts.native_answer import NativeDialect
from gateway.http.generate import GenerationEndpoint
from gateway.http.idempotency import Idempotency
from gateway.ports import Services


def sagemaker(services: Services, idempotency: Idempotency) -> dict[str, GenerationEndpoint]:
    """The endpoint by path; the platform posts every request there."""
    return {"/invocations": GenerationEndpoint(services, NativeDialect(), idempotency)}
