"""`sluice sagemaker deploy|status|delete`: the calls, checked against the service's own model by botocore."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
import structlog
from botocore.stub import ANY, Stubber
from moto import mock_aws
from typer.testing import CliRunner

from gateway.config.errors import ConfigError
from ops.cli.main import app
from ops.sagemaker.deploy import POLL_S, Aws, EndpointError, delete, deploy, status
from ops.sagemaker.plan import AwsCall, EndpointState, config_call, endpoint_call, model_call, scaling_calls
from ops.sagemaker.signals import metric_data, publish
from ops.sagemaker.spec import EndpointSpec, load_spec

EXAMPLE = Path(__file__).parents[2] / "deploy" / "sagemaker" / "endpoint.yaml"
ARN = "arn:aws:sagemaker:us-east-1:123456789012:thing/x"


class Time:
    """A clock in seconds that moves only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Cloud:
    """boto3's clients with prepared answers; arguments are compared, and checked by the service's model."""

    def __init__(self) -> None:
        key = {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}
        clients = {s: boto3.client(s, **key) for s in ("sagemaker", "application-autoscaling")}
        self._stubs = {service: Stubber(client) for service, client in clients.items()}
        self.time = Time()
        self.aws = Aws(clients, self.time, self.time.sleep)

    def expect(self, call: AwsCall, answer: Mapping[str, Any]) -> None:
        self._stubs[call.service].add_response(call.method, dict(answer), dict(call.arguments))

    def endpoint(self, status: str, config: str, **more: Any) -> None:
        answer = {
            "EndpointName": "sluice",
            "EndpointArn": ARN,
            "EndpointConfigName": config,
            "EndpointStatus": status,
            "CreationTime": 0,
            "LastModifiedTime": 0,
            **more,
        }
        self._stubs["sagemaker"].add_response("describe_endpoint", answer, {"EndpointName": "sluice"})

    def config(self, name: str, instance_type: str = "ml.g5.xlarge") -> None:
        variant = {"VariantName": "main", "ModelName": "m", "InstanceType": instance_type}
        answer = {
            "EndpointConfigName": name,
            "EndpointConfigArn": ARN,
            "ProductionVariants": [variant],
            "CreationTime": 0,
        }
        self._stubs["sagemaker"].add_response(
            "describe_endpoint_config", answer, {"EndpointConfigName": name}
        )

    def refuse(self, service: str, method: str, code: str, message: str) -> None:
        self._stubs[service].add_client_error(method, code, message)

    def no_endpoint(self) -> None:
        self.refuse(
            "sagemaker", "describe_endpoint", "ValidationException", 'Could not find endpoint "sluice".'
        )

    def no_config(self) -> None:
        message = "Could not find endpoint configuration."
        self.refuse("sagemaker", "describe_endpoint_config", "ValidationException", message)

    def scaled(self, spec: EndpointSpec) -> None:
        for call in scaling_calls(spec):
            self.expect(call, {"PolicyARN": ARN} if call.method == "put_scaling_policy" else {})

    def unregistered(self) -> None:
        arguments = {"ServiceNamespace": "sagemaker", "ResourceId": ANY, "ScalableDimension": ANY}
        self._stubs["application-autoscaling"].add_response("deregister_scalable_target", {}, arguments)

    def add(self, method: str, answer: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self._stubs["sagemaker"].add_response(method, dict(answer), dict(arguments))

    def __enter__(self) -> Cloud:
        for stub in self._stubs.values():
            stub.activate()
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            for stub in self._stubs.values():
                stub.assert_no_pending_responses()


@pytest.fixture
def spec() -> EndpointSpec:
    return load_spec(EXAMPLE)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud() as made:
        yield made


def config_name(spec: EndpointSpec) -> str:
    return str(config_call(spec).arguments["EndpointConfigName"])


def discard(line: str) -> None:
    """Discards a progress line."""


def test_a_first_deployment_makes_everything_and_waits_until_it_serves(
    cloud: Cloud, spec: EndpointSpec
) -> None:
    lines: list[str] = []
    cloud.no_endpoint()
    cloud.expect(model_call(spec), {"ModelArn": ARN})
    cloud.expect(config_call(spec), {"EndpointConfigArn": ARN})
    create = endpoint_call(spec, None)
    assert create is not None and create.method == "create_endpoint"
    cloud.expect(create, {"EndpointArn": ARN})
    for state in ("Creating", "Creating", "InService"):
        cloud.endpoint(state, config_name(spec))
    cloud.scaled(spec)
    deploy(spec, cloud.aws, lines.append)
    assert cloud.time.now == 2 * POLL_S
    assert [line for line in lines if "InService" in line] == ["endpoint sluice: InService"]


def test_the_same_file_twice_changes_nothing_but_the_scaling(cloud: Cloud, spec: EndpointSpec) -> None:
    cloud.endpoint("InService", config_name(spec))
    cloud.config(config_name(spec))
    there = "Cannot create already existing model"
    cloud.refuse("sagemaker", "create_model", "ValidationException", there)
    cloud.refuse("sagemaker", "create_endpoint_config", "ValidationException", there)
    cloud.scaled(spec)
    deploy(spec, cloud.aws, discard)


def test_an_update_keeps_the_fleets_size_and_can_roll_back(cloud: Cloud, spec: EndpointSpec) -> None:
    cloud.endpoint("InService", "sluice-000000000000")
    cloud.config("sluice-000000000000")
    cloud.expect(model_call(spec), {"ModelArn": ARN})
    cloud.expect(config_call(spec), {"EndpointConfigArn": ARN})
    update = endpoint_call(spec, EndpointState("sluice-000000000000", "InService", "ml.g5.xlarge"))
    assert update is not None and update.arguments["RetainAllVariantProperties"] is True
    assert update.arguments["DeploymentConfig"]["AutoRollbackConfiguration"]["Alarms"]
    cloud.expect(update, {"EndpointArn": ARN})
    cloud.endpoint("Updating", "sluice-000000000000")
    cloud.endpoint("InService", config_name(spec))
    cloud.scaled(spec)
    deploy(spec, cloud.aws, discard)


def test_another_instance_type_leaves_autoscaling_for_the_update(cloud: Cloud, spec: EndpointSpec) -> None:
    cloud.endpoint("InService", "sluice-000000000000")
    cloud.config("sluice-000000000000", "ml.g6.xlarge")
    cloud.expect(model_call(spec), {"ModelArn": ARN})
    cloud.expect(config_call(spec), {"EndpointConfigArn": ARN})
    cloud.unregistered()
    update = endpoint_call(spec, EndpointState("sluice-000000000000", "InService", "ml.g6.xlarge"))
    assert update is not None
    cloud.expect(update, {"EndpointArn": ARN})
    cloud.endpoint("InService", config_name(spec))
    cloud.scaled(spec)
    deploy(spec, cloud.aws, discard)


@pytest.mark.parametrize(
    ("state", "config", "said"),
    [("Failed", "sluice-1", "did not pass the ping"), ("InService", "sluice-000000000000", "rolled back")],
)
def test_a_failure_says_what_the_platform_said(
    cloud: Cloud, spec: EndpointSpec, state: str, config: str, said: str
) -> None:
    cloud.no_endpoint()
    cloud.expect(model_call(spec), {"ModelArn": ARN})
    cloud.expect(config_call(spec), {"EndpointConfigArn": ARN})
    create = endpoint_call(spec, None)
    assert create is not None
    cloud.expect(create, {"EndpointArn": ARN})
    cloud.endpoint(state, config, FailureReason="did not pass the ping")
    with pytest.raises(EndpointError, match=said) as raised:
        deploy(spec, cloud.aws, discard)
    assert "did not pass the ping" in str(raised.value)


def test_waiting_has_an_end(cloud: Cloud, spec: EndpointSpec) -> None:
    cloud.no_endpoint()
    cloud.expect(model_call(spec), {"ModelArn": ARN})
    cloud.expect(config_call(spec), {"EndpointConfigArn": ARN})
    create = endpoint_call(spec, None)
    assert create is not None
    cloud.expect(create, {"EndpointArn": ARN})
    for _ in range(int(spec.update.at_most_seconds / POLL_S) + 1):
        cloud.endpoint("Creating", config_name(spec))
    with pytest.raises(EndpointError, match="at_most_seconds"):
        deploy(spec, cloud.aws, discard)


def test_a_rolling_update_goes_by_batches(spec: EndpointSpec) -> None:
    update = spec.update.model_copy(update={"kind": "rolling", "batch_percent": 20})
    call = endpoint_call(
        spec.model_copy(update={"update": update}), EndpointState("other", "InService", None)
    )
    assert call is not None
    policy = call.arguments["DeploymentConfig"]["RollingUpdatePolicy"]
    assert policy["MaximumBatchSize"] == {"Type": "CAPACITY_PERCENT", "Value": 20}


def test_scaling_follows_queue_and_active_sequences(spec: EndpointSpec) -> None:
    register, *policies = scaling_calls(spec)
    assert (register.arguments["MinCapacity"], register.arguments["MaxCapacity"]) == (1, 4)
    tracked = [p.arguments["TargetTrackingScalingPolicyConfiguration"] for p in policies]
    metrics = [t["CustomizedMetricSpecification"] for t in tracked]
    published = metric_data(METRICS, endpoint=spec.name, variant="main")
    for metric in metrics:
        [data] = [d for d in published["MetricData"] if d["MetricName"] == metric["MetricName"]]
        assert (published["Namespace"], data["Dimensions"]) == (metric["Namespace"], metric["Dimensions"])
    assert [t["TargetValue"] for t in tracked] == [85, 5]


def test_what_is_deployed_is_named_by_its_content(spec: EndpointSpec) -> None:
    other = spec.model_copy(update={"environment": {**spec.environment, "MAX_NUM_SEQS": "64"}})
    assert model_call(spec).arguments["ModelName"] == model_call(load_spec(EXAMPLE)).arguments["ModelName"]
    assert model_call(spec).arguments["ModelName"] != model_call(other).arguments["ModelName"]
    assert config_name(spec) != config_name(other)


def test_a_deletion_takes_all_that_was_made_for_the_endpoint_and_nothing_else(cloud: Cloud) -> None:
    cloud.unregistered()
    cloud.endpoint("InService", "sluice-0123456789ab")
    cloud.config("sluice-0123456789ab")
    cloud.add("delete_endpoint", {}, {"EndpointName": "sluice"})
    cloud.endpoint("Deleting", "sluice-0123456789ab")
    cloud.config("sluice-0123456789ab")
    cloud.no_endpoint()
    listed = {"NameContains": "sluice-", "MaxResults": 100}
    row = {"EndpointConfigArn": ARN, "CreationTime": 0}
    configs = [
        {"EndpointConfigName": name, **row} for name in ("sluice-0123456789ab", "sluice-two-0123456789ab")
    ]
    cloud.add("list_endpoint_configs", {"EndpointConfigs": configs, "NextToken": "more"}, listed)
    older = [{"EndpointConfigName": "sluice-ba9876543210", **row}]
    cloud.add("list_endpoint_configs", {"EndpointConfigs": older}, {**listed, "NextToken": "more"})
    for name in ("sluice-0123456789ab", "sluice-ba9876543210"):
        cloud.add("delete_endpoint_config", {}, {"EndpointConfigName": name})
    models = [{"ModelName": "sluice-aaaaaaaaaaaa", "ModelArn": ARN, "CreationTime": 0}]
    cloud.add("list_models", {"Models": models}, listed)
    cloud.add("delete_model", {}, {"ModelName": "sluice-aaaaaaaaaaaa"})
    delete("sluice", cloud.aws, discard)


def test_an_endpoint_whose_configuration_is_gone_is_deleted_all_the_same(cloud: Cloud) -> None:
    cloud.unregistered()
    cloud.endpoint("InService", "sluice-0123456789ab")
    cloud.no_config()
    cloud.add("delete_endpoint", {}, {"EndpointName": "sluice"})
    cloud.endpoint("Deleting", "sluice-0123456789ab")
    cloud.no_config()
    cloud.no_endpoint()
    listed = {"NameContains": "sluice-", "MaxResults": 100}
    cloud.add("list_endpoint_configs", {"EndpointConfigs": []}, listed)
    cloud.add("list_models", {"Models": []}, listed)
    delete("sluice", cloud.aws, discard)


def test_an_endpoint_whose_configuration_is_gone_is_updated_not_created_again(
    cloud: Cloud, spec: EndpointSpec
) -> None:
    cloud.endpoint("InService", "sluice-0123456789ab")
    cloud.no_config()
    cloud.expect(model_call(spec), {"ModelArn": ARN})
    cloud.expect(config_call(spec), {"EndpointConfigArn": ARN})
    cloud.unregistered()
    update = endpoint_call(spec, EndpointState("sluice-0123456789ab", "InService", None))
    assert update is not None and update.method == "update_endpoint"
    cloud.expect(update, {"EndpointArn": ARN})
    cloud.endpoint("InService", config_name(spec))
    cloud.scaled(spec)
    deploy(spec, cloud.aws, discard)


def test_deleting_what_is_not_there_is_no_error(cloud: Cloud) -> None:
    cloud.refuse("application-autoscaling", "deregister_scalable_target", "ObjectNotFoundException", "none")
    cloud.no_endpoint()
    cloud.add(
        "list_endpoint_configs", {"EndpointConfigs": []}, {"NameContains": "sluice-", "MaxResults": 100}
    )
    cloud.add("list_models", {"Models": []}, {"NameContains": "sluice-", "MaxResults": 100})
    delete("sluice", cloud.aws, discard)


def test_status_of_an_endpoint_that_is_not_there_says_so(cloud: Cloud) -> None:
    cloud.no_endpoint()
    with pytest.raises(EndpointError, match="none in this region"):
        status("sluice", cloud.aws)


@pytest.mark.slow
def test_an_endpoint_is_deployed_and_deleted_in_moto(
    spec: EndpointSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto stores the state, so each call has to fit the calls before it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    # An instance type that moto knows.
    spec = spec.model_copy(update={"instance_type": "ml.g4dn.xlarge"})
    time, wanted = Time(), config_name(spec)
    with mock_aws():
        services = ("sagemaker", "application-autoscaling")
        aws = Aws({s: boto3.client(s, region_name="us-east-1") for s in services}, time, time.sleep)
        deploy(spec, aws, discard)
        found = status("sluice", aws)
        assert (found["status"], found["config"], found["min"], found["max"]) == ("InService", wanted, 1, 4)
        policies = aws.clients["application-autoscaling"].describe_scaling_policies(
            ServiceNamespace="sagemaker"
        )
        assert len(policies["ScalingPolicies"]) == 2
        delete("sluice", aws, discard)
        assert aws.sagemaker.list_models()["Models"] == []
        assert aws.sagemaker.list_endpoint_configs()["EndpointConfigs"] == []
        delete("sluice", aws, discard)
        with pytest.raises(EndpointError):
            status("sluice", aws)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("image", "sluice:latest", "image"),
        ("instance_type", "g5.xlarge", "instance_type"),
        ("scaling", {"min_instances": 5, "max_instances": 2}, "max_instances"),
        ("model_data", "s3://bucket/file.tar.gz", "model_data"),
        ("subnets", ["subnet-1"], "security_groups"),
        ("imge", "x", "imge"),
    ],
)
def test_a_wrong_file_is_told_by_key(tmp_path: Path, key: str, value: object, said: str) -> None:
    import yaml

    file = tmp_path / "endpoint.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(EXAMPLE.read_text()), key: value}))
    with pytest.raises(ConfigError, match=said):
        load_spec(file)


def test_a_dry_run_prints_the_calls_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    done = CliRunner().invoke(app, ["sagemaker", "deploy", str(EXAMPLE), "--dry-run"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    methods = [name for calls in shown.values() for call in calls for name in call]
    assert methods[:4] == [
        "sagemaker.create_model",
        "sagemaker.create_endpoint_config",
        "sagemaker.create_endpoint",
        "sagemaker.update_endpoint",
    ]
    assert methods[4] == "application-autoscaling.register_scalable_target"


def test_a_cloud_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["sagemaker", "status", "sluice", "--region", "us-east-1"])
    assert done.exit_code == 1
    assert "sluice: AWS: Could not connect" in done.output and "Traceback" not in done.output


def test_a_region_that_is_set_nowhere_is_asked_for_by_its_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    done = CliRunner().invoke(app, ["sagemaker", "status", "sluice"])
    assert (done.exit_code, "--region" in done.output) == (1, True)


METRICS = """\
# TYPE sluice_admission_queue_depth gauge
sluice_admission_queue_depth{backend="local",class="high"} 1.0
sluice_admission_queue_depth{backend="local",class="normal"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 2.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 61.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.75
"""


def test_signals_count_running_sequences_and_all_waiting_requests() -> None:
    def values(page: str) -> dict[str, float]:
        data = metric_data(page, endpoint="sluice", variant="main")["MetricData"]
        return {one["MetricName"]: one["Value"] for one in data}

    assert values(METRICS) == {"ActiveSequences": 61.0, "WaitingRequests": 7.0, "KvCacheUsage": 75.0}
    assert set(values("").values()) == {0.0}


def test_signals_have_the_form_that_cloudwatch_takes() -> None:
    client = boto3.client(
        "cloudwatch", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    arguments = metric_data(METRICS, endpoint="sluice", variant="main")
    with Stubber(client) as stub:
        stub.add_response("put_metric_data", {}, arguments)
        client.put_metric_data(**arguments)


def test_publishing_goes_on_after_a_failure_and_ends_with_the_gateway() -> None:
    puts = iter([OSError("the gateway starts"), None, RuntimeError("throttled"), None])
    pauses = iter([False, False, False, False, True])

    def put() -> None:
        if (error := next(puts)) is not None:
            raise error

    with structlog.testing.capture_logs() as log:
        publish(put, pause=lambda: next(pauses))
    assert [one.get("reason") for one in log] == ["the gateway starts", None, "throttled", None]
    assert next(puts, "none") == "none"
