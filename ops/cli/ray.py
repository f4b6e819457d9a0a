"""`sluice ray`: the gateway as a Ray Serve application."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.console import plain, print_json, print_rows, repeated
from ops.cli.operator import AsJson, command_group
from ops.cli.startup import need_modules, one_line_errors, print_errors

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview, ServeStatus

ray = command_group("ray", "Run the gateway on a Ray cluster: ingress replicas in front of engine replicas.")

REACH_TIMEOUT_S = 5.0
LOOK_S = 5.0  # time between two looks at what the deployments wait for

Address = Annotated[
    str,
    typer.Option(envvar="RAY_ADDRESS", show_envvar=True, help="The cluster: HOST:PORT of its head, or auto."),
]
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The YAML file, at the same path on every node.")
]
Name = Annotated[str, typer.Option("--application", help="`ray.application` of the configuration.")]


@ray.command("deploy")
def deploy(
    config: Config,
    folder: Annotated[
        Path | None, typer.Option(help="Working folder on every node; default: the current one.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address for Serve's proxies, if they do not run yet.", show_default="0.0.0.0"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of Serve's proxies, if they do not run yet.", show_default="8000"
        ),
    ] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Deploy the application, or update the running one to this configuration, and wait until it runs.

    Replicas of an earlier configuration are replaced one at a time, each after its requests have ended.

    Example: sluice ray deploy /etc/sluice/sluice.yaml --address head:6379
    """
    with _ray_errors():
        from gateway.config.settings import load_settings

        settings = load_settings(config)
        serve = _connected(address)
        from ops.ray.application import make_application
        from ops.ray.port import ClusterPlace

        name = settings.ray.application
        place = ClusterPlace(str(config.resolve()), str((folder or Path.cwd()).resolve()), name)
        _start_proxies(serve, host=host, port=port)
        try:
            with _messages(serve, name):
                serve.run(make_application(settings, place), name=name, route_prefix="/")
        except RuntimeError:
            # Serve's error names only the deployments; their status messages have the reason.
            _print(serve.status(), name, as_json)
            raise
        _print(serve.status(), name, as_json)


@ray.command("status")
def status(name: Name = "sluice", address: Address = "auto", as_json: AsJson = False) -> None:
    """Show the application's deployments, the replicas of each by state, and the proxies.

    Exit code 0 if it runs and a proxy is healthy, otherwise 1.
    """
    with _ray_errors():
        reported = _connected(address).status()
        _print(reported, name, as_json)
        application = reported.applications.get(name)
        runs = application is not None and str(application.status.value) == "RUNNING"
        if not runs or "HEALTHY" not in proxies(reported).values():
            raise typer.Exit(1)


class RayError(Exception):
    """Ray does not answer or has refused; the message is ready to print."""


def _connected(address: str) -> Any:
    """Connect to the cluster at ``address``, unless this process is connected; returns ``ray.serve``.

    Raises NotInstalled, RayError: no cluster answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    need_modules("ray", extra="ray")
    import ray as library
    from ray import serve

    if not library.is_initialized():
        try:
            _reach(address)
            library.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, library.exceptions.RayError) as error:
            first = str(error).strip().partition("\n")[0]
            if isinstance(error, library.exceptions.AuthenticationError):
                raise RayError(f"--address: {address}: Ray's token: {first}") from None
            hint = "start one with `ray start --head`"
            if not os.environ.get("RAY_AUTH_MODE"):
                # Ray cannot tell a cluster that needs a token from a missing one.
                hint += ", or set RAY_AUTH_MODE=token if it was started with one"
            raise RayError(f"--address: {address}: no Ray cluster answers ({first}); {hint}") from None
    return serve


def _start_proxies(serve: Any, **given: str | int | None) -> None:
    """Start Serve's proxies. Raises RayError: they run already, with another value than the given one."""
    running = serve.context._get_global_client(raise_if_no_controller_running=False)
    if running is None:
        serve.start(http_options={"host": "0.0.0.0", "port": 8000} | {k: v for k, v in given.items() if v})
        return
    for name, value in given.items():
        if value not in (None, used := getattr(running.http_config, name)):
            raise RayError(f"--{name} is {value}; this cluster's proxies have {used} until `serve shutdown`")


def _reach(address: str) -> None:
    """Test the address, because Ray retries it for minutes. Raises OSError if nothing listens there."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S):
            return


def brief(message: str) -> str:
    """The first and the last line of Serve's message, without colors and the traceback between."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines() if line.strip()]
    return " ".join(lines if len(lines) <= 2 else (lines[0], lines[-1]))


def _messages(serve: Any, name: str, every_s: float = LOOK_S) -> AbstractContextManager[None]:
    """Print what Serve says about the deployments while the block waits: which resources are missing."""
    printed = set[str]()

    def look() -> None:
        application = serve.status().applications.get(name)
        for one in application.deployments.values() if application else ():
            if one.message not in printed and (text := brief(one.message)):
                print_errors(text)
                printed.add(one.message)

    return repeated(look, every_s)


def proxies(reported: ServeStatus) -> dict[str, str]:
    return {node: str(status.value) for node, status in sorted(reported.proxies.items())}


def shown(reported: ApplicationStatusOverview) -> dict[str, Any]:
    return {
        "status": reported.status.value,
        "message": brief(reported.message),
        "deployments": {
            name: {
                "status": one.status.value,
                "message": brief(one.message),
                "replicas": {
                    str(getattr(state, "value", state)): count for state, count in one.replica_states.items()
                },
            }
            for name, one in sorted(reported.deployments.items())
        },
    }


def _print(status: ServeStatus, name: str, as_json: bool) -> None:
    reported = status.applications.get(name)
    if reported is None:
        print_errors(f"no application {name!r} on this cluster; see `sluice ray deploy`")
        return
    values = {**shown(reported), "proxies": proxies(status)}
    if as_json:
        print_json({"application": name, **values})
        return
    rows: list[tuple[str, ...]] = []
    for deployment, one in values["deployments"].items():
        replicas = ", ".join(f"{count} {state.lower()}" for state, count in one["replicas"].items())
        rows.append((deployment, one["status"], replicas, one["message"]))
    rows += [("proxy", state, "", node) for node, state in values["proxies"].items()]
    headings = ("deployment", "status", "replicas", "message")
    print_rows(headings, rows, title=plain(f"{name}: {values['status']}"), title_justify="left")


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Print errors that the operator can correct as one line each."""
    with one_line_errors(RayError):
        try:
            yield
        except typer.Exit:
            raise
        except RuntimeError as error:
            # Serve has no exception class for an application that cannot be deployed.
            # An actor's error shows its traceback; its cause is the error itself.
            reason = getattr(error, "cause", error)
            hint = "not deployed; the replicas' logs are in Ray's session folder"
            raise RayError(f"{reason}\n{hint}") from None
