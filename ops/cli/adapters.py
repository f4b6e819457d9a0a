"""`sluice adapters`: the LoRA registry of a running gateway."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.console import screen, table_of
from ops.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

if TYPE_CHECKING:
    from rich.console import Console

# A large adapter comes over the network before the gateway answers.
ADD_TIMEOUT_S = 3_600.0
POLL_S = 0.5

Id = Annotated[str, typer.Argument(metavar="ID", help="A version's id.")]
Comment = Annotated[str, typer.Option("--comment", "--message", "-m", help="Why; kept in the audit log.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Validate and show how it would be; change nothing.")]

adapters = typer.Typer(
    name="adapters", help="The LoRA adapters: versions, aliases, what is loaded.", no_args_is_help=True
)


@adapters.command("list")
def list_adapters(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """List versions and aliases, and what this gateway has loaded."""
    with _told() as console:
        found = AdminClient(url, key).get("admin", "adapters")
        if as_json:
            _print_json(found)
            return
        _print_list(console, found)


@adapters.command("show")
def show(name: Id, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show one version, or an alias and its history."""
    with _told() as console:
        found = AdminClient(url, key).get("admin", "adapters", name)
        _print_json(found) if as_json else _print_one(console, found)


@adapters.command("add")
def add(
    location: Annotated[
        str, typer.Argument(metavar="LOCATION", help="A folder, a .tar.gz or .zip, or s3://bucket/prefix.")
    ],
    name: Annotated[
        str, typer.Option("--id", help="The version's id; default: the location's last word.")
    ] = "",
    sha256: Annotated[str | None, typer.Option(help="The content that is expected.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, repeatable.")] = None,
    comment: Comment = "",
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Check an adapter and register it, staged. The gateway must see the location.

    Example: sluice adapters add models/adapters/manga_domain_v3 --label domain=manga
    """
    with _told() as console:
        place = location if location.startswith("s3://") else str(Path(location).absolute())
        body = {
            "id": name or _last_word(location),
            "location": place,
            "sha256": sha256,
            "labels": _labels(label or ()),
            "comment": comment,
            "dry_run": dry_run,
        }
        client = AdminClient(url, key, ADD_TIMEOUT_S)
        with _progress(AdminClient(url, key), place, quiet=as_json):
            found = client.post("admin", "adapters", body=json.dumps(body).encode())
        _print_done(console, found, as_json)


@adapters.command("verify")
def verify(name: Id, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Check a version's copy on the gateway's machine anew, byte by byte."""
    _post(url, key, as_json, name, "verify")


@adapters.command("preload")
def preload(name: Id, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Load a version now, in every gateway and on the workers that they load adapters on."""
    _post(url, key, as_json, name, "preload")


@adapters.command("pin")
def pin(
    name: Id,
    off: Annotated[bool, typer.Option("--off", help="Take the pin away.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Keep a version loaded in every gateway."""
    _post(url, key, as_json, name, "unpin" if off else "pin")


@adapters.command("promote")
def promote(
    name: Id,
    alias: Annotated[str | None, typer.Option(help="The alias that shall lead to it.")] = None,
    percent: Annotated[
        float, typer.Option(min=0.001, max=100, help="Of the alias' sessions; below 100: a canary.")
    ] = 100.0,
    force: Annotated[bool, typer.Option("--force", help="Without a passing evaluation; audited.")] = False,
    comment: Comment = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Lead an alias to a version, or serve it under its own name.

    Example: sluice adapters promote manga_domain_v4 --alias manga_domain --percent 10
    """
    if force:
        _sure(f"Promote {name} without a passing evaluation?", yes or dry_run)
    elif sys.stdin.isatty():
        _sure(f"Lead {percent:g} % of {alias or name} to {name}?", yes or dry_run)
    body = {"alias": alias, "percent": percent, "force": force, "comment": comment, "dry_run": dry_run}
    _post(url, key, as_json, name, "promote", **body)


@adapters.command("rollback")
def rollback(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias to lead back.")],
    to: Annotated[str | None, typer.Option(help="The version; default: the one before.")] = None,
    comment: Comment = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Lead an alias back to an earlier version; ends its canary too."""
    _sure(f"Lead {alias} back to {to or 'the version before'}?", yes or dry_run)
    _post(url, key, as_json, "aliases", alias, "rollback", to=to, comment=comment, dry_run=dry_run)


@adapters.command("end-canary")
def end_canary(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias.")],
    comment: Comment = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Give the canary's sessions back to the version that has the others."""
    if sys.stdin.isatty():
        _sure(f"Give all of {alias} back to the version that has the others?", yes or dry_run)
    _post(url, key, as_json, "aliases", alias, "end-canary", comment=comment, dry_run=dry_run)


@adapters.command("retire")
def retire(
    name: Id,
    comment: Comment = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Serve a version no more; it does not come back."""
    _sure(f"Retire {name} for good?", yes or dry_run)
    _post(url, key, as_json, name, "retire", comment=comment, dry_run=dry_run)


def _post(url: str, key: str | None, as_json: bool, *path: str, **body: Any) -> None:
    with _told() as console:
        client = AdminClient(url, key)
        found = client.post("admin", "adapters", *path, body=json.dumps(body).encode())
        _print_done(console, found, as_json)


def _sure(question: str, yes: bool) -> None:
    """Ask on a terminal; without one ``--yes`` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        print(f"sluice: {question} say --yes", file=sys.stderr)
        raise typer.Exit(2)
    typer.confirm(question, abort=True, err=True)


@contextmanager
def _told() -> Iterator[Console]:
    """A console; what the gateway refuses becomes one line and exit code 1."""
    try:
        yield screen()
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@contextmanager
def _progress(client: AdminClient, location: str, *, quiet: bool) -> Iterator[None]:
    """A bar on a terminal while the gateway fetches; the gateway is asked how far it is."""
    if quiet or not location.startswith("s3://") or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    from gateway.weights.progress import bar
    from gateway.weights.values import Progress

    over = threading.Event()

    def watch(on_progress: Callable[[Progress], None]) -> None:
        while not over.wait(POLL_S):
            try:
                fetching = client.get("admin", "adapters")["fetching"]
            except AdminError:
                continue  # the answer to `add` tells what is wrong
            for one in fetching:
                if one["location"] == location:
                    on_progress(Progress(one["done_bytes"], one["total_bytes"] or 0))

    with bar(Console(stderr=True), location) as on_progress:
        watcher = threading.Thread(target=watch, args=(on_progress,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join(1.0)


def _labels(given: Any) -> dict[str, str]:
    labels = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise AdminError(f"--label: given {one!r}; allowed: KEY=VALUE")
        labels[name] = value
    return labels


def _last_word(location: str) -> str:
    word = location.rstrip("/").rpartition("/")[2]
    for suffix in (".tar.gz", ".tgz", ".tar", ".zip"):
        word = word.removesuffix(suffix)
    return word


def _print_json(found: Any) -> None:
    print(json.dumps(found, ensure_ascii=False, indent=2))


def _print_list(console: Console, found: Any) -> None:
    table = table_of(
        "id", "state", "aliases", "evaluated", "loaded", "leases", "heat", "rank", "MiB", "labels"
    )
    for one in found["adapters"]:
        report = one["evaluation"]
        loaded = ("pinned " if one["pinned"] else "") + ("yes" if one["resident"] else "")
        table.add_row(
            one["id"],
            one["state"],
            ", ".join(one["aliases"]),
            "" if report is None else "passed" if report["passed"] else "failed",
            loaded.strip(),
            str(one["leases"]),
            f"{one['heat']:.1f}",
            str(one["rank"]),
            f"{one['size_bytes'] / 2**20:.1f}",
            " ".join(f"{key}={value}" for key, value in one["labels"].items()),
        )
    console.print(table)
    if found["aliases"]:
        aliases = table_of("alias", "leads to", "canary", "before")
        for one in found["aliases"]:
            canary = f"{one['canary']} {one['percent']:g}%" if one["canary"] else ""
            aliases.add_row(
                one["alias"], one["target"] or "", canary, ", ".join(reversed(one["history"][-3:]))
            )
        console.print(aliases)
    for one in found["refused"]:
        console.print(f"refused: {one['id']}: {one['reason']}", markup=False, highlight=False, soft_wrap=True)
    places = f"{len(found['resident'])} of {found['places']} places taken" if found["places"] else "no engine"
    console.print(f"{len(found['adapters'])} versions, {places}", markup=False, highlight=False)


def _print_done(console: Console, found: Any, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    _print_one(console, found)
    if found.get("dry_run"):
        print("valid; nothing was changed")
    if found.get("others_told") is False:
        print("sluice: the state store is away: the other gateways were not told", file=sys.stderr)


def _print_one(console: Console, found: Any) -> None:
    for name, value in found.items():
        console.print(f"{name:<16}{_word(value)}", markup=False, highlight=False, soft_wrap=True)


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
