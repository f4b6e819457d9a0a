"""`sluice sagemaker`: the container's entry point, and commands for the endpoint: deploy, status, delete."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.console import print_json
from ops.cli.operator import AsJson, Yes, command_group
from ops.cli.startup import ConfigFile, config_path, need_modules, one_line_errors
from ops.client import AdminClient, reach_loopback

if TYPE_CHECKING:
    from ops.sagemaker.deploy import Aws

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
METRICS_TIMEOUT_S = 5.0

sagemaker = command_group("sagemaker", "Sluice as a SageMaker endpoint.")

SpecFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The endpoint's file, as deploy/sagemaker/endpoint.yaml.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint's name.")]
Region = Annotated[str | None, typer.Option(help="AWS region; default: as the AWS SDK finds it.")]


@sagemaker.command("serve")
def serve(config: ConfigFile = None) -> None:
    """Run the gateway in the container, on port 8080, configured by the platform's environment.

    /ping is healthy once the model is loaded; keys are off, because only the platform reaches the port.
    If SLUICE_SAGEMAKER_ENDPOINT is set, queue and active sequences are published in CloudWatch.

    Example: docker run IMAGE serve
    """
    from engine.own_modules import with_own_modules
    from ops.cli.serve import end_process
    from ops.cli.serve import serve as run
    from ops.sagemaker.container import ENDPOINT_ENV, container_environment, log_level

    with _aws_errors():
        environ = container_environment(os.environ)
    os.environ.update(environ)
    if environ.get(ENDPOINT_ENV):
        # A separate process, so that its waits do not block the gateway's event loop.
        command = [sys.executable, "-m", "ops.cli", "sagemaker", "publish"]
        os.spawnve(os.P_NOWAIT, sys.executable, command, with_own_modules(os.environ))
    end_process(run(config_path(config), log_level(os.environ)))


@sagemaker.command("publish", hidden=True)
def publish() -> None:
    """Publish the metrics for autoscaling until the gateway that started this process ends."""
    import time

    import boto3

    from ops.sagemaker.container import ENDPOINT_ENV, PORT, VARIANT, VARIANT_ENV
    from ops.sagemaker.signals import EVERY_ENV, EVERY_S, metric_data
    from ops.sagemaker.signals import publish as run

    # A proxy of the environment is for AWS, not for the gateway beside this process.
    reach_loopback()
    parent = os.getppid()
    endpoint, variant = os.environ[ENDPOINT_ENV], os.environ.get(VARIANT_ENV, VARIANT)
    url = f"http://127.0.0.1:{os.environ.get('SLUICE_SERVER__PORT', PORT)}"
    gateway = AdminClient(url, timeout_s=METRICS_TIMEOUT_S)
    cloudwatch = boto3.client("cloudwatch", config=_bounded())

    every_s = float(os.environ.get(EVERY_ENV) or EVERY_S)

    def put() -> None:
        data = metric_data(gateway.text("metrics"), endpoint=endpoint, variant=variant)
        cloudwatch.put_metric_data(**data)

    def pause() -> bool:
        time.sleep(every_s)
        return os.getppid() != parent

    run(put, pause=pause)


@sagemaker.command("deploy")
def deploy(
    file: SpecFile,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the calls; ask and change nothing.")
    ] = False,
) -> None:
    """Create the endpoint, or update it to the file without downtime, and wait until it serves.

    Deploying the same file again changes nothing. To go back, deploy the earlier file.

    Example: sluice sagemaker deploy deploy/sagemaker/endpoint.yaml --dry-run
    """
    from ops.sagemaker import plan
    from ops.sagemaker.deploy import deploy as run
    from ops.sagemaker.spec import load_spec

    with _aws_errors():
        spec = load_spec(file)
        if dry_run:
            there = plan.EndpointState("another", "InService", spec.instance_type)
            calls: dict[str, tuple[plan.AwsCall | None, ...]] = {
                "first": (plan.model_call(spec), plan.config_call(spec)),
                "when there is none": (plan.endpoint_call(spec, None),),
                "when it is there": (plan.endpoint_call(spec, there),),
                "when it serves": plan.scaling_calls(spec),
            }
            shown = {
                when: [{f"{call.service}.{call.method}": call.arguments} for call in some if call is not None]
                for when, some in calls.items()
            }
            print_json(shown)
            return
        run(spec, _aws(spec.region), _report)


@sagemaker.command("status")
def status(name: Name, region: Region = None, as_json: AsJson = False) -> None:
    """Show the endpoint's state, instances and scaling bounds. Exit code 1 unless it is in service.

    Example: sluice sagemaker status sluice --region us-east-1
    """
    from ops.sagemaker.deploy import status as run

    with _aws_errors():
        found = run(name, _aws(region))
    if as_json:
        print_json(found)
    else:
        for key, value in found.items():
            print(f"{key:10} {'-' if value is None else value}")
    raise typer.Exit(0 if found["status"] == "InService" else 1)


@sagemaker.command("delete")
def delete(name: Name, region: Region = None, yes: Yes = False) -> None:
    """Delete the endpoint, its scaling, and the configurations and models that were created for it.

    Example: sluice sagemaker delete sluice --yes
    """
    from ops.sagemaker.deploy import delete as run

    if not yes:
        typer.confirm(f"Delete the endpoint {name} and everything that was created for it?", abort=True)
    with _aws_errors():
        run(name, _aws(region), _report)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _aws(region: str | None) -> Aws:
    import time

    need_modules("boto3", extra="bedrock")
    import boto3

    from ops.sagemaker.deploy import Aws, EndpointError

    session = boto3.session.Session(region_name=region)
    if session.region_name is None:
        raise EndpointError("no AWS region is set; give --region or AWS_DEFAULT_REGION")
    services = ("sagemaker", "application-autoscaling")
    return Aws({s: session.client(s, config=_bounded()) for s in services}, time.monotonic, time.sleep)


def _bounded() -> Any:
    from botocore.config import Config

    return Config(connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S)


@contextmanager
def _aws_errors() -> Iterator[None]:
    """Print errors that the operator can correct as one line each."""
    from ops.sagemaker.deploy import EndpointError

    with one_line_errors(EndpointError):
        try:
            yield
        except Exception as error:
            # botocore's errors have no common base class that can be named without importing boto3.
            if not type(error).__module__.startswith("botocore"):
                raise
            raise EndpointError(f"AWS: {' '.join(str(error).split())}") from None
