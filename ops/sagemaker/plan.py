"""Plans the calls that bring an endpoint to its specification; no I/O.

SageMaker's models and endpoint configurations are immutable. The name of each has a digest of its content:
deploying the same file again changes nothing, and a change makes a new pair, to which the endpoint moves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ops.sagemaker.container import ENDPOINT_ENV, VARIANT, VARIANT_ENV
from ops.sagemaker.signals import ACTIVE, NAMESPACE, WAITING
from ops.sagemaker.spec import EndpointSpec

NAMESPACE_OF_SCALING = "sagemaker"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
POLICIES = ("active-sequences", "waiting-requests")


@dataclass(frozen=True, slots=True)
class AwsCall:
    """One call: boto3's service and method, and its arguments."""

    service: str
    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndpointState:
    """The current state of an endpoint; ``instance_type`` is that of the configuration in force."""

    config_name: str
    status: str
    instance_type: str | None


def model_call(spec: EndpointSpec) -> AwsCall:
    container: dict[str, Any] = {
        "Image": spec.image,
        "Environment": {**spec.environment, ENDPOINT_ENV: spec.name, VARIANT_ENV: VARIANT},
    }
    if spec.model_data is not None:
        source = {"S3Uri": spec.model_data, "S3DataType": "S3Prefix", "CompressionType": "None"}
        container["ModelDataSource"] = {"S3DataSource": source}
    arguments: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": spec.role_arn}
    if spec.subnets:
        network = {"Subnets": list(spec.subnets), "SecurityGroupIds": list(spec.security_groups)}
        arguments["VpcConfig"] = network
    return AwsCall("sagemaker", "create_model", _with_digest_name("ModelName", spec, arguments))


def config_call(spec: EndpointSpec) -> AwsCall:
    """``create_endpoint_config`` for the model of the same file."""
    variant = {
        "VariantName": VARIANT,
        "ModelName": model_call(spec).arguments["ModelName"],
        "InstanceType": spec.instance_type,
        "InitialInstanceCount": spec.scaling.min_instances,
        "ContainerStartupHealthCheckTimeoutInSeconds": spec.startup_timeout_seconds,
        "ModelDataDownloadTimeoutInSeconds": spec.download_timeout_seconds,
        # By load, not round robin: an answer may have ten tokens or a thousand.
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    arguments: dict[str, Any] = {"ProductionVariants": [variant]}
    if spec.kms_key_id is not None:
        arguments["KmsKeyId"] = spec.kms_key_id
    return AwsCall(
        "sagemaker", "create_endpoint_config", _with_digest_name("EndpointConfigName", spec, arguments)
    )


def endpoint_call(spec: EndpointSpec, current: EndpointState | None) -> AwsCall | None:
    """``create_endpoint`` or ``update_endpoint``; None if the endpoint has this configuration already."""
    config_name = config_call(spec).arguments["EndpointConfigName"]
    arguments: dict[str, Any] = {"EndpointName": spec.name, "EndpointConfigName": config_name}
    if current is None:
        return AwsCall("sagemaker", "create_endpoint", {**arguments, "Tags": _tags(spec)})
    if current.config_name == config_name and current.status == "InService":
        return None
    # Retained, so that the new version does not start under load with the smallest number of instances.
    arguments |= {"RetainAllVariantProperties": True, "DeploymentConfig": _deployment(spec)}
    return AwsCall("sagemaker", "update_endpoint", arguments)


def unregister_call(name: str) -> AwsCall:
    """Remove the variant from autoscaling: required before a new instance type, and before a deletion."""
    return AwsCall("application-autoscaling", "deregister_scalable_target", _target(name))


def scaling_calls(spec: EndpointSpec) -> tuple[AwsCall, ...]:
    """Set the bounds, then one policy per signal: each alone scales out, both must agree to scale in."""
    scaling, target = spec.scaling, _target(spec.name)
    bounds = {**target, "MinCapacity": scaling.min_instances, "MaxCapacity": scaling.max_instances}
    calls = [AwsCall("application-autoscaling", "register_scalable_target", bounds)]
    goals = ((ACTIVE, scaling.active_sequences), (WAITING, scaling.waiting_requests))
    for policy, (metric, goal) in zip(POLICIES, goals, strict=True):
        tracking = {
            "TargetValue": goal,
            "CustomizedMetricSpecification": {
                "MetricName": metric,
                "Namespace": NAMESPACE,
                "Dimensions": [
                    {"Name": "EndpointName", "Value": spec.name},
                    {"Name": "VariantName", "Value": VARIANT},
                ],
                "Statistic": "Average",
                "Unit": "Count",
            },
            "ScaleOutCooldown": scaling.scale_out_cooldown_seconds,
            "ScaleInCooldown": scaling.scale_in_cooldown_seconds,
        }
        named = {"PolicyName": f"{spec.name}-{policy}", "PolicyType": "TargetTrackingScaling"}
        arguments = {**target, **named, "TargetTrackingScalingPolicyConfiguration": tracking}
        calls.append(AwsCall("application-autoscaling", "put_scaling_policy", arguments))
    return tuple(calls)


def _deployment(spec: EndpointSpec) -> dict[str, Any]:
    update = spec.update
    if update.kind == "rolling":
        made: dict[str, Any] = {
            "RollingUpdatePolicy": {
                "MaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": update.batch_percent},
                "WaitIntervalInSeconds": update.wait_seconds,
                "MaximumExecutionTimeoutInSeconds": update.at_most_seconds,
            }
        }
    else:
        routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": update.wait_seconds}
        if update.canary_percent is not None:
            size = {"Type": "CAPACITY_PERCENT", "Value": update.canary_percent}
            routing |= {"Type": "CANARY", "CanarySize": size}
        made = {
            "BlueGreenUpdatePolicy": {
                "TrafficRoutingConfiguration": routing,
                # Time for the old fleet to finish its answers.
                "TerminationWaitInSeconds": update.wait_seconds,
                "MaximumExecutionTimeoutInSeconds": update.at_most_seconds,
            }
        }
    if update.rollback_alarms:
        alarms = [{"AlarmName": name} for name in update.rollback_alarms]
        made["AutoRollbackConfiguration"] = {"Alarms": alarms}
    return made


def _target(name: str) -> dict[str, str]:
    return {
        "ServiceNamespace": NAMESPACE_OF_SCALING,
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": DIMENSION,
    }


def _with_digest_name(key: str, spec: EndpointSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:12]
    return {key: f"{spec.name}-{digest}", **arguments, "Tags": _tags(spec)}


def _tags(spec: EndpointSpec) -> list[dict[str, str]]:
    tags = {**spec.tags, "sluice:endpoint": spec.name}
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
