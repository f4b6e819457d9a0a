"""`sluice routes`: which backend serves which share of a route; `sluice audit`: what operators did."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.console import screen, table_of
from ops.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

if TYPE_CHECKING:
    from rich.console import Console

AT = ("admin", "routing")

routes = typer.Typer(
    name="routes",
    help="Which backend serves which share of a route: show, change, undo.",
    no_args_is_help=True,
)

Message = Annotated[str, typer.Option("--message", "-m", help="Why; kept in the history and the audit log.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Validate and show what would change; change nothing.")
]
Expected = Annotated[
    int | None,
    typer.Option("--expected", min=0, help="Refuse unless this is still the last revision."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
RouteName = Annotated[str, typer.Argument(metavar="ROUTE", help="A route's name.")]
BackendName = Annotated[str, typer.Argument(metavar="BACKEND", help="A backend's name.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many, newest first.")]


@routes.command("show")
def show(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show the revision in force.

    Example: sluice routes show --url http://127.0.0.1:8000
    """
    with _told() as console:
        found = AdminClient(url, key).get(*AT)
        if as_json:
            _print_json(found)
        else:
            _print_revision(console, found)


@routes.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A routing file; - reads standard input.")],
    message: Message = "",
    expected: Expected = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a routing file the next revision, in force everywhere within a second. Asks first at a terminal.

    Example: sluice routes apply routing.yaml -m "new worker pool" --dry-run
    """
    with _told() as console:
        body = {"config": _read(file), **_order(message, expected, dry_run)}
        client = AdminClient(url, key)
        _changed(console, "apply", lambda sent: client.put(*AT, body=sent), body, yes, as_json)


@routes.command("set-weight")
def set_weight(
    route: RouteName,
    backend: BackendName,
    percent: Annotated[float, typer.Argument(metavar="PERCENT", min=0, max=100, help="0 to 100.")],
    message: Message = "",
    expected: Expected = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Give a backend its share of a route; the others share the rest in proportion. Asks first at a terminal.

    Example: sluice routes set-weight self_hosted_generation bedrock 5
    """
    body = {"route": route, "backend": backend, "percent": percent, **_order(message, expected, dry_run)}
    _posted("weights", body, yes, url, key, as_json)


@routes.command("promote")
def promote(
    route: RouteName,
    backend: BackendName,
    message: Message = "",
    expected: Expected = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Give a backend the whole route. Asks first at a terminal.

    Example: sluice routes promote self_hosted_generation bedrock --yes
    """
    body = {"route": route, "backend": backend, **_order(message, expected, dry_run)}
    _posted("promote", body, yes, url, key, as_json)


@routes.command("rollback")
def rollback(
    to: Annotated[
        int | None, typer.Option("--to", min=1, help="A revision's number; default: the last other one.")
    ] = None,
    message: Message = "",
    expected: Expected = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make an earlier configuration the next revision. Asks first at a terminal.

    Without --to: the last one before that says something else.

    Example: sluice routes rollback --to 12 -m "canary too slow" --yes
    """
    body = {**({} if to is None else {"to": to}), **_order(message, expected, dry_run)}
    _posted("rollback", body, yes, url, key, as_json)


@routes.command("history")
def history(limit: Limit = 20, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """List who changed what, when and why, newest first."""
    with _told() as console:
        found = AdminClient(url, key).get(*AT, "history", query={"limit": limit})
        if as_json:
            _print_json(found)
            return
        table = table_of("revision", "at", "by", "action", "after", "comment")
        for one in found["revisions"]:
            table.add_row(
                *map(str, (one["revision"], one["created_at"], one["author"], one["action"], one["parent"])),
                _plain(one["comment"]),
            )
        console.print(table)


@routes.command("diff")
def diff(
    a: Annotated[int, typer.Argument(metavar="A", min=1, help="A revision's number.")],
    b: Annotated[int, typer.Argument(metavar="B", min=1, help="Another one's.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show what differs from revision A to revision B."""
    with _told() as console:
        found = AdminClient(url, key).get(*AT, "diff", query={"a": a, "b": b})
        if as_json:
            _print_json(found)
        else:
            print_changes(console, found["changes"])


def audit(limit: Limit = 20, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """List what operators did, newest first.

    Example: sluice audit -n 50
    """
    with _told() as console:
        found = AdminClient(url, key).get("admin", "audit", query={"limit": limit})
        if as_json:
            _print_json(found)
            return
        table = table_of("at", "who", "action", "what", "result", "comment")
        for one in found["entries"]:
            table.add_row(
                *(_plain(one[name]) for name in ("at", "who", "action", "target", "result", "comment"))
            )
        console.print(table)


def _posted(word: str, body: dict[str, Any], yes: bool, url: str, key: str | None, as_json: bool) -> None:
    with _told() as console:
        client = AdminClient(url, key)
        _changed(console, word, lambda sent: client.post(*AT, word, body=sent), body, yes, as_json)


def _changed(
    console: Console,
    word: str,
    send: Callable[[bytes], Any],
    body: dict[str, Any],
    yes: bool,
    as_json: bool,
) -> None:
    """Ask with the very changes before the eyes, then have exactly these made."""
    # Standard input that was the file has no answer left.
    if sys.stdin.isatty() and not yes and not body["dry_run"]:
        seen = send(_dumps({**body, "dry_run": True}))
        # Standard output is for the answer alone where a machine reads it.
        from rich.console import Console as Screen

        print_changes(Screen(stderr=True) if as_json else console, seen["changes"])
        typer.confirm(f"{word}?", abort=True, err=True)
        body = {**body, "expected_revision": seen["parent"]}
    _print_done(console, send(_dumps(body)), as_json)


def _order(message: str, expected: int | None, dry_run: bool) -> dict[str, Any]:
    return {
        "comment": message,
        "dry_run": dry_run,
        **({} if expected is None else {"expected_revision": expected}),
    }


def _dumps(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _read(file: Path) -> Any:
    """Raises AdminError."""
    import yaml

    try:
        data = yaml.safe_load(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
        json.dumps(data)
        return data
    except OSError as error:
        raise AdminError(f"{file}: cannot be read: {error.strerror or type(error).__name__}") from None
    except (UnicodeDecodeError, TypeError, yaml.YAMLError) as error:
        raise AdminError(f"{file}: {' '.join(str(error).split())}") from None


@contextmanager
def _told() -> Iterator[Console]:
    """A console; what the gateway refuses becomes lines on standard error and exit code 1."""
    try:
        yield screen()
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _print_json(found: Any) -> None:
    print(json.dumps(found, ensure_ascii=False, indent=2))


def _plain(text: object) -> str:
    """The text without a meaning for the table."""
    from rich.markup import escape

    return escape(str(text))


def _print_revision(console: Console, found: Any) -> None:
    told = f"revision {found['revision']}, {found['created_at']}, by {found['author']}: {found['comment']}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    if found["behind"]:
        behind = f"revision {found['behind']['revision']} cannot be used here: {found['behind']['reason']}"
        console.print(behind, markup=False, style="bold red", soft_wrap=True)
    table = table_of("route", "backend", "weight %", "fallback", "prompt version")
    for name, route in found["config"]["routes"].items():
        fallback = ", ".join(route.get("fallback", ["degraded"]))
        version = route.get("prompt_version") or ""
        for number, backend in enumerate(route["backends"]):
            first = (name, fallback, version) if number == 0 else ("", "", "")
            weight = f"{backend.get('weight', 100):g}"
            table.add_row(*map(_plain, (first[0], backend["name"], weight, first[1], first[2])))
    console.print(table)


def print_changes(console: Console, changes: Any) -> None:
    """A table of what differs."""
    if not changes:
        console.print("nothing differs")
        return
    table = table_of("where", "before", "after")
    for one in changes:
        table.add_row(*map(_plain, (one["path"], json.dumps(one["before"]), json.dumps(one["after"]))))
    console.print(table)


def _print_done(console: Console, done: Any, as_json: bool) -> None:
    if as_json:
        _print_json(done)
        return
    print_changes(console, done["changes"])
    if done["revision"] is None:
        console.print(f"valid; nothing was changed (revision {done['parent']} is the last one)")
    else:
        console.print(f"revision {done['revision']} is in force; undo it with: sluice routes rollback")
