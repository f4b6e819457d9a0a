"""`sluice ray`: the gateway as a Ray Serve application."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview, ServeStatus

ray = typer.Typer(
    name="ray",
    help="Run the gateway on a Ray cluster: ingress replicas in front of engine replicas.",
    no_args_is_help=True,
)

REACH_TIMEOUT_S = 5.0

Address = Annotated[
    str,
    typer.Option(envvar="RAY_ADDRESS", show_envvar=True, help="The cluster: HOST:PORT of its head, or auto."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The YAML file, at the same path on every node.")
]
Name = Annotated[str, typer.Option("--application", help="`ray.application` of the configuration.")]


@ray.command("deploy")
def deploy(
    config: Config,
    folder: Annotated[
        Path | None, typer.Option(help="Working folder on every node; default: the present one.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where Serve's proxies listen, if they do not yet.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Their port.")] = 8000,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Deploy the application, or change the one that runs to this configuration, and wait until it runs.

    Replicas of an earlier configuration are replaced one after the other, each once its answers have ended.

    Example: sluice ray deploy /etc/sluice/sluice.yaml --address head:6379
    """
    with _told():
        from gateway.config.settings import load_settings

        settings = load_settings(config)
        serve = _connected(address)
        from ops.ray.application import make_application
        from ops.ray.cluster_place import ClusterPlace

        name = settings.ray.application
        place = ClusterPlace(str(config.resolve()), str((folder or Path.cwd()).resolve()), name)
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(make_application(settings, place), name=name, route_prefix="/")
        except RuntimeError:
            # Its own words name the deployments alone; why is in their messages.
            _print(serve.status(), name, as_json)
            raise
        _print(serve.status(), name, as_json)


@ray.command("status")
def status(name: Name = "sluice", address: Address = "auto", as_json: AsJson = False) -> None:
    """Show the application's deployments, how many replicas each has by state, and the proxies in front.

    Exit code 0 when it runs and a proxy is healthy, 1 when not.
    """
    with _told():
        reported = _connected(address).status()
        _print(reported, name, as_json)
        application = reported.applications.get(name)
        runs = application is not None and str(application.status.value) == "RUNNING"
        if not runs or "HEALTHY" not in proxies(reported).values():
            raise typer.Exit(1)


class RayError(Exception):
    """Ray is not there, or has refused; the message is ready to print."""


def _connected(address: str) -> Any:
    """Serve, on the cluster at ``address``; stays connected to where the process is connected already.

    Raises:
        RayError: Ray is not installed, or nothing answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray as library
        from ray import serve
    except ImportError:
        raise RayError("Ray is not installed; install the extra: pip install 'sluice-gateway[ray]'") from None
    if not library.is_initialized():
        try:
            _reach(address)
            library.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except library.exceptions.AuthenticationError as error:
            first = str(error).strip().partition("\n")[0]
            raise RayError(f"--address: {address}: Ray's token: {first}") from None
        except (OSError, RuntimeError, ValueError, library.exceptions.RayError) as error:
            first = str(error).strip().partition("\n")[0]
            raise RayError(
                f"--address: {address}: no Ray cluster answers ({first}); start one with `ray start --head`"
                f"{_token_hint()}"
            ) from None
    return serve


def _token_hint() -> str:
    """A cluster that asks for a token looks to Ray like one that is not there."""
    if os.environ.get("RAY_AUTH_MODE"):
        return ""
    return ", or set RAY_AUTH_MODE=token if it was started with one"


def _reach(address: str) -> None:
    """Ray itself asks for minutes where nobody is. Raises OSError: nobody listens there."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S):
            return


def shown(reported: ApplicationStatusOverview) -> dict[str, Any]:
    """The status as JSON values."""
    return {
        "status": reported.status.value,
        "message": reported.message,
        "deployments": {
            name: {
                "status": one.status.value,
                "message": one.message,
                "replicas": {
                    str(getattr(state, "value", state)): count for state, count in one.replica_states.items()
                },
            }
            for name, one in sorted(reported.deployments.items())
        },
    }


def proxies(reported: ServeStatus) -> dict[str, str]:
    """How the proxy of each node is."""
    return {node: str(status.value) for node, status in sorted(reported.proxies.items())}


def brief(message: str) -> str:
    """What Serve says, without the frames between its own words and the cause; for a table of rich's."""
    from rich.markup import escape

    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return escape(" ".join(lines if len(lines) <= 2 else (lines[0], lines[-1])))


def _print(status: ServeStatus, name: str, as_json: bool) -> None:
    reported = status.applications.get(name)
    if reported is None:
        print(f"sluice: no application {name!r} on this cluster; see `sluice ray deploy`", file=sys.stderr)
        return
    values = {**shown(reported), "proxies": proxies(status)}
    if as_json:
        print(json.dumps({"application": name, **values}))
        return
    from ops.cli.console import screen, table_of

    table = table_of(
        "deployment", "status", "replicas", "message",
        title=f"{name}: {values['status']}", title_justify="left",
    )  # fmt: skip
    for deployment, one in values["deployments"].items():
        replicas = ", ".join(f"{count} {state.lower()}" for state, count in one["replicas"].items())
        table.add_row(deployment, one["status"], replicas, brief(one["message"]))
    for node, state in values["proxies"].items():
        table.add_row("proxy", state, "", node)
    screen().print(table)


@contextmanager
def _told() -> Iterator[None]:
    """One clear line for what the operator can mend."""
    from ops.cli.startup import START_ERRORS

    try:
        yield
    except (RayError, *START_ERRORS) as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except RuntimeError as error:
        # Serve raises no type of its own when an application cannot be deployed.
        print(f"sluice: {error}", file=sys.stderr)
        print("sluice: not deployed; the replicas' logs lie in Ray's session folder", file=sys.stderr)
        raise typer.Exit(1) from None
