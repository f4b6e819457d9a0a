"""`sluice routes`: the share of each backend in a route; `sluice audit`: the actions of operators."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.console import opened, print_lines, print_rows, print_text, screen, started
from ops.cli.operator import (
    Backend,
    Change,
    Operator,
    Route,
    command_group,
    given,
    operator_command,
    with_options,
)
from ops.client import AdminError

AT = ("admin", "routing")
MAX_SHOWN = 1_000  # most differences in a table; one of 11,000 takes 20 seconds

NOT_EXPORTED = "allowed: a file that `sluice audit export` wrote"

routes = command_group("routes", "Shares of backends in routes: show, change, roll back.")

Expected = Annotated[
    int | None,
    typer.Option("--expected", min=0, help="Refuse the change unless this is still the last revision."),
]
Limit = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of entries, newest first.")
]


@dataclass(frozen=True, slots=True)
class RouteChange(Change):
    """The options of a command that changes the routing."""

    expected: Expected = None


@operator_command(routes, "show")
def show(gateway: Operator) -> None:
    """Show the revision in force.

    Example: sluice routes show --url http://127.0.0.1:8000
    """
    gateway.show(gateway.get(*AT), _print_revision)


@operator_command(routes, "apply")
def apply(
    gateway: Operator,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A routing file, or what `show --json` printed; - reads standard input."
        ),
    ],
    change: RouteChange,
) -> None:
    """Make a routing file the next revision; all gateways use it within a second. Asks first at a terminal.

    Example: sluice routes apply routing.yaml -m "new worker pool" --dry-run
    """
    client, body = gateway.client(), {"config": read_routing(file)}
    _change(gateway, "apply", lambda sent: client.put(*AT, body=sent), body, change)


@operator_command(routes, "set-weight")
def set_weight(
    gateway: Operator,
    route: Route,
    backend: Backend,
    percent: Annotated[float, typer.Argument(metavar="PERCENT", min=0, max=100, help="0 to 100.")],
    change: RouteChange,
) -> None:
    """Set a backend's share of a route; the others share the rest in proportion. Asks first at a terminal.

    Example: sluice routes set-weight self_hosted_generation bedrock 5
    """
    _post(gateway, "weights", change, route=route, backend=backend, percent=percent)


@operator_command(routes, "promote")
def promote(gateway: Operator, route: Route, backend: Backend, change: RouteChange) -> None:
    """Give a backend the whole route. Asks first at a terminal.

    Example: sluice routes promote self_hosted_generation bedrock --yes
    """
    _post(gateway, "promote", change, route=route, backend=backend)


@operator_command(routes, "rollback")
def rollback(
    gateway: Operator,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", min=1, help="A revision's number; default: the last with another configuration."
        ),
    ] = None,
    *,
    change: RouteChange,
) -> None:
    """Make an earlier configuration the next revision. Asks first at a terminal.

    Without --to, it is the last earlier revision with a different configuration.

    Example: sluice routes rollback --to 12 -m "canary too slow" --yes
    """
    _post(gateway, "rollback", change, to=to)


@operator_command(routes, "history")
def history(gateway: Operator, limit: Limit = 20) -> None:
    """List who changed what, when and why, newest first."""
    columns = {
        "revision": "revision", "created_at": "at", "author": "by", "action": "action", "parent": "parent",
        "comment": "comment",
    }  # fmt: skip
    _list(gateway, gateway.get(*AT, "history", query={"limit": limit}), "revisions", columns)


@operator_command(routes, "diff")
def diff(
    gateway: Operator,
    a: Annotated[int, typer.Argument(metavar="A", min=1, help="A revision's number.")],
    b: Annotated[int, typer.Argument(metavar="B", min=1, help="Another revision's number.")],
) -> None:
    """Show the changes from revision A to revision B."""
    found = gateway.get(*AT, "diff", query={"a": a, "b": b})
    gateway.show(found, lambda _: print_changes(found["changes"]))


audit = typer.Typer(name="audit", invoke_without_command=True)


@audit.callback()
@with_options()
def list_audit(gateway: Operator, context: typer.Context, limit: Limit = 20) -> None:
    """List the actions of operators, newest first; export the log, verify its hashes.

    Example: sluice audit -n 50
    """
    if context.invoked_subcommand is not None:
        return
    columns = {
        "at": "at", "who": "who", "action": "action", "target": "target", "result": "result",
        "comment": "comment",
    }  # fmt: skip
    _list(gateway, gateway.get("admin", "audit", query={"limit": limit}), "entries", columns)


@operator_command(audit, "export")
def export(
    gateway: Operator,
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file; default: standard output.")
    ] = None,
) -> None:
    """Write all records, oldest first, as JSON lines.

    Example: sluice audit export -o audit.jsonl
    """
    records = started(_records(gateway))
    with opened(to) as out:
        for entry in records:
            print_text(json.dumps(entry, ensure_ascii=False), file=out)


@operator_command(audit, "verify")
def verify(
    gateway: Operator,
    file: Annotated[Path | None, typer.Option(help="An exported file instead of a gateway.")] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The hash that an earlier verify printed: the log must still contain it."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="A file with the keys that records are signed with.")
    ] = None,
) -> None:
    """Check that no record was changed, removed or inserted; print the last record's hash.

    With a key, from --key-file or SLUICE_AUDIT_KEY, the signatures are checked as well.

    Example: sluice audit verify --head 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
    """
    from gateway.config.secret_keys import read_keys
    from gateway.state.audit import KEY_VARIABLE, AuditBroken
    from gateway.state.audit import verify as verified

    keys = read_keys("--key-file", key_file, KEY_VARIABLE, os.environ)
    try:
        if file is None:
            found = verified(_records(gateway), keys)
        else:
            with file.open("rb") as lines:
                found = verified(_exported(file, lines), keys)
    except AuditBroken as error:
        raise AdminError(f"the audit log was tampered with: {error}") from None
    except OSError as error:
        raise AdminError(f"{file}: cannot be read: {error.strerror}") from None
    except (TypeError, AttributeError):  # a record with a value of another type, or no record at all
        fault = (
            "the answer is not an audit log; is the gateway running there?" if file is None else NOT_EXPORTED
        )
        raise AdminError(f"{file or gateway.url}: {fault}") from None
    if head is not None and head not in found.hashes:
        raise AdminError(f"the audit log was truncated: no record has the hash {head}")
    reported = {
        "records": found.records,
        "signed": found.records - found.unsigned if keys else 0,
        "head": (found.hashes or [""])[-1],
    }
    gateway.show(reported, _print_chain)


def _print_chain(reported: Any) -> None:
    signed = f", {reported['signed']} signed" if reported["signed"] else ""
    print_lines(f"{reported['records']} records{signed}; the last one's hash: {reported['head'] or 'none'}")


def _exported(file: Path, lines: Iterable[bytes]) -> Iterator[Any]:
    """The records of an exported log. Raises AdminError, which names the line that is none."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise AdminError(f"{file}: line {number} is not JSON; {NOT_EXPORTED}") from None
        if not isinstance(entry, dict) or "number" not in entry:
            raise AdminError(f"{file}: line {number} is not a record; {NOT_EXPORTED}")
        yield entry


def _records(gateway: Operator) -> Iterator[Any]:
    after = 0
    while page := gateway.get("admin", "audit", query={"limit": 1_000, "after": after})["entries"]:
        yield from page
        after = page[-1]["number"]


def _list(gateway: Operator, found: Any, key: str, columns: Mapping[str, str]) -> None:
    """Print the rows under ``key``; ``columns`` has the heading of each field."""
    rows = ([one[name] for name in columns] for one in found[key])
    gateway.show(found, lambda _: print_rows(tuple(columns.values()), rows))


def _post(gateway: Operator, word: str, change: RouteChange, **body: Any) -> None:
    _change(gateway, word, lambda sent: gateway.post(*AT, word, **sent), given(**body), change)


def _change(
    gateway: Operator,
    word: str,
    send: Callable[[dict[str, Any]], Any],
    body: dict[str, Any],
    change: RouteChange,
) -> None:
    """At a terminal, show the changes and ask for confirmation; then make exactly these changes."""
    body |= change.body
    if change.expected is not None:
        body["expected_revision"] = change.expected
    if sys.stdin.isatty() and not change.yes and not change.dry_run:
        seen = send({**body, "dry_run": True})
        # With --json, only the answer goes to standard output.
        print_changes(seen["changes"], stderr=gateway.as_json)
        typer.confirm(f"{word}?", abort=True, err=True)
        body = {**body, "expected_revision": seen["parent"]}
    gateway.show(send(body), _print_done, has=("revision",))


def read_routing(file: Path) -> Any:
    """The routing in a YAML file, on standard input (``-``) or in the output of ``show --json``.

    Raises AdminError.
    """
    from gateway.config.yaml_file import load_yaml

    data = load_yaml(Path("/dev/stdin") if str(file) == "-" else file, AdminError)
    try:
        json.dumps(data)
    except (TypeError, ValueError) as error:  # a ValueError: an anchor within itself
        raise AdminError(f"{file}: {error}; allowed: what JSON can say") from None
    return data["config"] if isinstance(data, dict) and {"revision", "config"} <= data.keys() else data


def _print_revision(found: Any) -> None:
    print_lines(
        f"revision {found['revision']}, {found['created_at']}, by {found['author']}: {found['comment']}"
    )
    if found["behind"]:
        behind = f"revision {found['behind']['revision']} cannot be used here: {found['behind']['reason']}"
        screen().print(behind, markup=False, style="bold red", soft_wrap=True)
    rows = []
    for name, route in found["config"]["routes"].items():
        once = (name, ", ".join(route.get("fallback", [])), route.get("prompt_version") or "")
        for backend in route["backends"]:
            rows.append((once[0], backend["name"], f"{backend.get('weight', 100):g}", *once[1:]))
            once = ("", "", "")
    print_rows(("route", "backend", "weight %", "fallback", "prompt version"), rows)


def print_changes(changes: Any, *, stderr: bool = False) -> None:
    if not changes:
        print_lines("no differences", stderr=stderr)
        return
    rows = ((one["path"], json.dumps(one["before"]), json.dumps(one["after"])) for one in changes[:MAX_SHOWN])
    print_rows(("setting", "before", "after"), rows, stderr=stderr)
    if (more := len(changes) - MAX_SHOWN) > 0:
        print_lines(f"and {more:,} more; --json has them all", stderr=stderr)


def _print_done(done: Any) -> None:
    print_changes(done["changes"])
    if done["revision"] is None:
        print_lines(f"valid; nothing was changed (revision {done['parent']} is the last one)")
    elif not done["changes"]:
        print_lines(f"the configuration is the same; revision {done['revision']} is in force")
    else:
        print_lines(f"revision {done['revision']} is in force; undo it with: sluice routes rollback")
