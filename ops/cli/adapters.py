"""`sluice adapters`: the LoRA registry of a running gateway."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.console import print_lines, print_rows, repeated, screen
from ops.cli.operator import Change, Comment, DryRun, Operator, command_group, operator_command, pairs
from ops.cli.startup import print_errors
from ops.client import AdminClient, AdminError

# The gateway may fetch a large adapter over the network, or read all of it, before it answers.
FETCH_TIMEOUT_S = 3_600.0
POLL_S = 0.5

Id = Annotated[str, typer.Argument(metavar="ID", help="A version's id.")]
Alias = Annotated[str, typer.Argument(metavar="ALIAS", help="An alias.")]

adapters = command_group("adapters", "LoRA adapters: versions, aliases, loaded adapters.")


@operator_command(adapters, "list")
def list_adapters(gateway: Operator) -> None:
    """List versions and aliases, and what this gateway has loaded."""
    gateway.show(gateway.get("admin", "adapters"), _print_list)


@operator_command(adapters, "show")
def show(gateway: Operator, name: Id) -> None:
    """Show one version, or an alias and its history."""
    gateway.show(gateway.get("admin", "adapters", name), _print_one, has=("id", "alias"))


@operator_command(adapters, "add")
def add(
    gateway: Operator,
    location: Annotated[
        str, typer.Argument(metavar="LOCATION", help="A folder, a .tar.gz, or s3://bucket/prefix.")
    ],
    name: Annotated[
        str, typer.Option("--id", help="The version's id; default: the location's last part.")
    ] = "",
    sha256: Annotated[str | None, typer.Option(help="The expected SHA-256 of the content.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, repeatable.")] = None,
    comment: Comment = "",
    dry_run: DryRun = False,
) -> None:
    """Check an adapter and register it in state staged. The gateway must be able to read the location.

    Example: sluice adapters add models/adapters/manga_domain_v3 --label domain=manga
    """
    place = location if location.startswith("s3://") else str(Path(location).absolute())
    body = {
        "id": name or re.sub(r"\.(tar\.gz|tgz|tar)$", "", location.rstrip("/").rpartition("/")[2]),
        "location": place,
        "sha256": sha256,
        "labels": pairs("--label", label or ()),
        "comment": comment,
        "dry_run": dry_run,
    }
    with _progress(gateway.client(), place, quiet=gateway.as_json):
        found = gateway.post("admin", "adapters", timeout_s=FETCH_TIMEOUT_S, **body)
    _print_done(gateway, found)


@operator_command(adapters, "verify")
def verify(gateway: Operator, name: Id) -> None:
    """Check a version's copy on the gateway's machine again, byte by byte."""
    _post(gateway, name, "verify", timeout_s=FETCH_TIMEOUT_S)


@operator_command(adapters, "preload")
def preload(gateway: Operator, name: Id) -> None:
    """Load a version now, in every gateway and on the workers that they load adapters on."""
    _post(gateway, name, "preload", timeout_s=FETCH_TIMEOUT_S)


@operator_command(adapters, "pin")
def pin(
    gateway: Operator,
    name: Id,
    off: Annotated[bool, typer.Option("--off", help="Remove the pin.")] = False,
) -> None:
    """Keep a version loaded in every gateway."""
    _post(gateway, name, "unpin" if off else "pin")


@operator_command(adapters, "promote")
def promote(
    gateway: Operator,
    name: Id,
    alias: Annotated[str | None, typer.Option(help="The alias to point to it.")] = None,
    percent: Annotated[
        float, typer.Option(min=0.001, max=100, help="Share of the alias' sessions; below 100: a canary.")
    ] = 100.0,
    force: Annotated[
        bool, typer.Option("--force", help="Allow it without a passing evaluation; audited.")
    ] = False,
    *,
    change: Change,
) -> None:
    """Point an alias to a version, or serve the version under its own name.

    Example: sluice adapters promote manga_domain_v4 --alias manga_domain --percent 10
    """
    if force:
        change.confirm(f"Promote {name} without a passing evaluation?", required=True)
    else:
        change.confirm(f"Give {name} {percent:g} % of {alias or name}?")
    _post(gateway, name, "promote", alias=alias, percent=percent, force=force, **change.body)


@operator_command(adapters, "rollback")
def rollback(
    gateway: Operator,
    alias: Alias,
    to: Annotated[str | None, typer.Option(help="The version; default: the previous one.")] = None,
    *,
    change: Change,
) -> None:
    """Point an alias to an earlier version again; also ends its canary."""
    change.confirm(f"Roll {alias} back to {to or 'the previous version'}?", required=True)
    _post(gateway, "aliases", alias, "rollback", to=to, **change.body)


@operator_command(adapters, "end-canary")
def end_canary(gateway: Operator, alias: Alias, change: Change) -> None:
    """End the canary of an alias: its sessions return to the stable version."""
    change.confirm(f"Return all sessions of {alias} to the stable version?")
    _post(gateway, "aliases", alias, "end-canary", **change.body)


@operator_command(adapters, "retire")
def retire(gateway: Operator, name: Id, change: Change) -> None:
    """Stop serving a version, for good."""
    change.confirm(f"Retire {name} for good?", required=True)
    _post(gateway, name, "retire", **change.body)


def _post(gateway: Operator, *path: str, **body: Any) -> None:
    _print_done(gateway, gateway.post("admin", "adapters", *path, **body))


@contextmanager
def _progress(client: AdminClient, location: str, *, quiet: bool) -> Iterator[None]:
    """Show a progress bar on a terminal while the gateway fetches, by polling its state."""
    if quiet or not location.startswith("s3://") or not sys.stderr.isatty():
        yield
        return
    from gateway.weights.progress import bar
    from gateway.weights.values import Progress

    def look() -> None:
        with suppress(AdminError):  # the answer to `add` has the reason
            for one in client.get("admin", "adapters")["fetching"]:
                if one["location"] == location:
                    on_progress(Progress(one["done_bytes"], one["total_bytes"] or 0))

    with bar(screen(stderr=True), location) as on_progress, repeated(look, POLL_S):
        yield


def _print_list(found: Any) -> None:
    versions = (
        (
            one["id"],
            one["state"],
            ", ".join(one["aliases"]),
            _evaluated(one["evaluation"]),
            " ".join(filter(None, ("pinned" * one["pinned"], "yes" * one["resident"]))),
            one["leases"],
            f"{one['heat']:.1f}",
            one["rank"],
            f"{one['size_bytes'] / 2**20:.1f}",
            " ".join(f"{key}={value}" for key, value in one["labels"].items()),
        )
        for one in found["adapters"]
    )
    headings = ("id", "state", "aliases", "evaluated", "loaded", "leases", "demand", "rank", "MiB", "labels")
    print_rows(headings, versions)
    if found["aliases"]:
        aliases = (
            (
                one["alias"],
                one["target"] or "",
                f"{one['canary']} {one['percent']:g}%" if one["canary"] else "",
                ", ".join(reversed(one["history"][-3:])),
            )
            for one in found["aliases"]
        )
        print_rows(("alias", "version", "canary", "earlier versions"), aliases)
    refused = (f"refused: {one['id']}: {one['reason']}" for one in found["refused"])
    places = f"{len(found['resident'])} of {found['places']} slots used" if found["places"] else "no engine"
    print_lines(*refused, f"{len(found['adapters'])} versions, {places}")


def _evaluated(report: Any) -> str:
    if report is None:
        return ""
    verdict = "passed" if report["passed"] else "failed"
    return verdict if report.get("signed") else f"{verdict}, unsigned"


def _print_done(gateway: Operator, found: Any) -> None:
    gateway.show(found, _print_one, has=("id", "alias"))
    if gateway.as_json:
        return
    if found.get("dry_run"):
        print("valid; nothing was changed")
    if found.get("others_told") is False:
        print_errors("the state store does not answer: the other gateways do not have this change yet")


def _print_one(found: Any) -> None:
    # Operators know an adapter's recent requests as its demand; the field has another name.
    shown = {"demand" if name == "heat" else name: value for name, value in found.items()}
    print_lines(*(f"{name:<16}{_word(value)}" for name, value in shown.items()))


def _word(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={_word(one)}" for key, one in value.items())
    return str(value)
