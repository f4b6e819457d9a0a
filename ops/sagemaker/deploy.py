"""Makes the calls of a plan with boto3's clients, and waits for the endpoint."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ops.sagemaker import plan
from ops.sagemaker.container import VARIANT
from ops.sagemaker.spec import EndpointSpec

POLL_S = 15.0
_NAMED_BY_US = "-[0-9a-f]{12}"


class EndpointError(Exception):
    """The endpoint could not be brought to its specification; the message is one line, ready to print."""


@dataclass(frozen=True, slots=True)
class Aws:
    """boto3's clients by service, and time: ``sleep`` waits seconds, ``clock`` is monotonic seconds."""

    clients: Mapping[str, Any]
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    @property
    def sagemaker(self) -> Any:
        return self.clients["sagemaker"]

    def make(self, call: plan.AwsCall) -> Any:
        return getattr(self.clients[call.service], call.method)(**call.arguments)


def deploy(spec: EndpointSpec, aws: Aws, reported: Callable[[str], None]) -> None:
    """Create or update the endpoint, wait until it serves, then set its scaling; each step is ``reported``.

    Raises:
        EndpointError: it failed, with the platform's reason, or took longer than ``update.at_most_seconds``.
        botocore's ClientError: a call was refused.
    """
    current = describe(spec.name, aws)
    _create(plan.model_call(spec), "ModelName", aws, reported)
    _create(plan.config_call(spec), "EndpointConfigName", aws, reported)
    call = plan.endpoint_call(spec, current)
    if call is None:
        reported(f"endpoint {spec.name}: in service with this configuration already")
    else:
        if current is not None and current.instance_type != spec.instance_type:
            _unregister(spec.name, aws, reported)
        aws.make(call)
        reported(f"endpoint {spec.name}: {call.method}")
        _wait_in_service(spec, aws, reported)
    for scaling in plan.scaling_calls(spec):
        aws.make(scaling)
        reported(f"scaling: {scaling.method}")


def describe(name: str, aws: Aws) -> plan.EndpointState | None:
    endpoint = _described(aws.sagemaker.describe_endpoint, EndpointName=name)
    if endpoint is None:
        return None
    config_name = endpoint["EndpointConfigName"]
    # An endpoint outlives the deletion of its configuration, without a known instance type.
    config = _described(aws.sagemaker.describe_endpoint_config, EndpointConfigName=config_name)
    variants = config["ProductionVariants"] if config is not None else []
    types = [v.get("InstanceType") for v in variants if v["VariantName"] == VARIANT]
    return plan.EndpointState(config_name, endpoint["EndpointStatus"], types[0] if types else None)


def status(name: str, aws: Aws) -> dict[str, Any]:
    """State, instances and scaling bounds. Raises EndpointError if there is no such endpoint."""
    endpoint = _described(aws.sagemaker.describe_endpoint, EndpointName=name)
    if endpoint is None:
        raise EndpointError(f"endpoint {name}: there is none in this region")
    scaling = aws.clients["application-autoscaling"]
    resource = {"ServiceNamespace": "sagemaker", "ResourceIds": [f"endpoint/{name}/variant/{VARIANT}"]}
    targets = scaling.describe_scalable_targets(**resource)["ScalableTargets"]
    variants = endpoint.get("ProductionVariants", [])
    return {
        "endpoint": name,
        "status": endpoint["EndpointStatus"],
        "failure": endpoint.get("FailureReason"),
        "config": endpoint["EndpointConfigName"],
        "instances": sum(v.get("CurrentInstanceCount", 0) for v in variants),
        "wanted": sum(v.get("DesiredInstanceCount", 0) for v in variants),
        "min": targets[0]["MinCapacity"] if targets else None,
        "max": targets[0]["MaxCapacity"] if targets else None,
    }


def delete(name: str, aws: Aws, reported: Callable[[str], None], *, at_most_s: float = 1800.0) -> None:
    """Delete the endpoint, its configurations and models. Raises EndpointError after ``at_most_s``."""
    _unregister(name, aws, reported)
    if describe(name, aws) is not None:
        aws.sagemaker.delete_endpoint(EndpointName=name)
        reported(f"endpoint {name}: delete_endpoint")
        end = aws.clock() + at_most_s
        while describe(name, aws) is not None:
            if aws.clock() >= end:
                raise EndpointError(f"endpoint {name}: still there after {at_most_s:g} s")
            aws.sleep(POLL_S)
    for config in list(_made_for(name, "list_endpoint_configs", "EndpointConfig", aws)):
        aws.sagemaker.delete_endpoint_config(EndpointConfigName=config)
        reported(f"configuration {config}: deleted")
    for model in list(_made_for(name, "list_models", "Model", aws)):
        aws.sagemaker.delete_model(ModelName=model)
        reported(f"model {model}: deleted")


def _create(call: plan.AwsCall, key: str, aws: Aws, reported: Callable[[str], None]) -> None:
    try:
        aws.make(call)
    except Exception as error:
        # The name has a digest of the content, so the existing one is the same.
        if _code(error) != "ValidationException" or "already exist" not in str(error):
            raise
        reported(f"{call.arguments[key]}: there already")
        return
    reported(f"{call.arguments[key]}: {call.method}")


def _unregister(name: str, aws: Aws, reported: Callable[[str], None]) -> None:
    try:
        aws.make(plan.unregister_call(name))
    except Exception as error:
        if _code(error) != "ObjectNotFoundException" and "No scalable target" not in str(error):
            raise
        return
    reported("scaling: deregister_scalable_target")


def _wait_in_service(spec: EndpointSpec, aws: Aws, reported: Callable[[str], None]) -> None:
    end = aws.clock() + spec.update.at_most_seconds
    wanted = plan.config_call(spec).arguments["EndpointConfigName"]
    last = ""
    while True:
        found = aws.sagemaker.describe_endpoint(EndpointName=spec.name)
        status = found["EndpointStatus"]
        if status != last:
            reported(f"endpoint {spec.name}: {status}")
        last, reason = status, found.get("FailureReason", "no reason was given")
        if status == "InService":
            if (other := found["EndpointConfigName"]) != wanted:
                raise EndpointError(f"endpoint {spec.name}: rolled back to {other}: {reason}")
            return
        if status in ("Failed", "OutOfService", "UpdateRollbackFailed"):
            raise EndpointError(f"endpoint {spec.name}: {status}: {reason}")
        if aws.clock() >= end:
            raise EndpointError(
                f"endpoint {spec.name}: still {status} after update.at_most_seconds "
                f"({spec.update.at_most_seconds}); see `sluice sagemaker status`"
            )
        aws.sleep(POLL_S)


def _made_for(name: str, method: str, kind: str, aws: Aws) -> Iterator[str]:
    pages = aws.sagemaker.get_paginator(method).paginate(
        NameContains=f"{name}-", PaginationConfig={"PageSize": 100}
    )
    for page in pages:
        for row in page[f"{kind}s"]:
            # Another endpoint's name may contain this one's.
            if re.fullmatch(re.escape(name) + _NAMED_BY_US, row[f"{kind}Name"]):
                yield row[f"{kind}Name"]


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _described(describe: Callable[..., Any], **names: str) -> Any:
    """The platform's description; ``None`` when there is no such object."""
    try:
        return describe(**names)
    except Exception as error:
        if _code(error) != "ValidationException" or "Could not find" not in str(error):
            raise
        return None
