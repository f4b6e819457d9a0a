"""`sluice keys`: make, list and revoke the keys of callers and operators."""

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from ops.cli.console import print_lines, print_rows
from ops.cli.operator import Operator, Yes, command_group, confirm, given, operator_command
from ops.cli.startup import print_errors
from ops.client import AdminError

AT = ("admin", "keys")
# Short names of the limits on the command line.
SHORT = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "tpd": "tokens_per_day"}

keys = command_group("keys", "Keys of callers and operators: create, list, revoke.")


@operator_command(keys, "create")
def create(
    gateway: Operator,
    tenant: Annotated[
        str, typer.Argument(metavar="TENANT", help="The tenant that its requests are billed to.")
    ],
    role: Annotated[
        str,
        typer.Option(help="caller, viewer, operator, admin, or front (another Sluice, which names tenants)."),
    ] = "caller",
    org: Annotated[str | None, typer.Option(help="The tenant's organization, for reports.")] = None,
    max_priority: Annotated[
        int | None,
        typer.Option(min=-1, max=1, help="Higher priorities are lowered to this; default: 0, for a front 1."),
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests per minute.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens per minute.")] = None,
    tpd: Annotated[int | None, typer.Option(min=1, help="Tokens per day.")] = None,
    usd_per_day: Annotated[float | None, typer.Option(help="US dollars per day (UTC).")] = None,
    usd_per_month: Annotated[float | None, typer.Option(help="US dollars per calendar month (UTC).")] = None,
    route: Annotated[
        list[str] | None, typer.Option(help="A route that the key may use, repeatable; default: all.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter or alias that the key may use, repeatable; default: all."),
    ] = None,
    tools: Annotated[bool, typer.Option(help="Whether the key's requests may have tools.")] = True,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use, repeatable; default: all.")
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="The key's own name for a model, repeatable."),
    ] = None,
    model_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL:LIMIT=N",
            help="A limit for one model (rpm, tpm, tpd, usd_per_day, usd_per_month), repeatable.",
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="ISO 8601 with an offset, as 2027-01-31T00:00:00Z.")
    ] = None,
    comment: Annotated[str, typer.Option("--comment", "-m", help="The purpose of the key.")] = "",
) -> None:
    """Create a key and print it: it is shown only once, and stored only as a hash.

    Standard output has only the key; everything else goes to standard error.

    Example: sluice keys create acme --rpm 600 --route self_hosted_generation
    """
    made = gateway.post(
        *AT,
        tenant=tenant,
        org=org,
        role=role,
        max_priority=max_priority,
        routes=route or None,
        adapters=adapter or None,
        tools=tools,
        models=model or None,
        aliases=dict(_alias(one) for one in alias or ()),
        limits=given(requests_per_minute=rpm, tokens_per_minute=tpm, tokens_per_day=tpd),
        budget=given(usd_per_day=usd_per_day, usd_per_month=usd_per_month),
        model_limits=_model_limits(model_limit or ()),
        expires_at=expires,
        comment=comment,
    )
    gateway.show(made, _print_key)


def _print_key(made: Any) -> None:
    print(made["key"])
    print(
        f"{made['id']} for {made['tenant']}, {made['role']}; store the key now, it is not shown again",
        file=sys.stderr,
    )
    for warning in made.get("warnings", ()):
        print_errors(f"warning: {warning}")


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not name or not model:
        raise AdminError(f"--alias {text!r}; allowed: NAME=MODEL, as gpt-4o=qwen3-8b")
    return name, model


def _model_limits(given: Sequence[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for text in given:
        model, _, limit = text.rpartition(":")
        name, _, amount = limit.partition("=")
        try:
            found.setdefault(model, {})[SHORT.get(name, name)] = _number(amount)
        except ValueError:
            model = ""
        if not model:
            raise AdminError(f"--model-limit {text!r}; allowed: MODEL:LIMIT=N, as qwen3-8b:tpm=100000")
    return found


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


@operator_command(keys, "list")
def list_keys(gateway: Operator) -> None:
    """List the keys that are not revoked, oldest first.

    Example: sluice keys list --json
    """
    gateway.show(gateway.get(*AT), _print_keys)


def _print_keys(found: Any) -> None:
    headings = ("id", "tenant", "role", "priority", "only for", "limits", "expires", "last used", "comment")
    rows = (
        (
            one["id"],
            one["tenant"],
            one["role"],
            one["max_priority"],
            ", ".join(
                (
                    *(one["routes"] or ()),
                    *(one["models"] or ()),
                    *(one["adapters"] or ()),
                    *(() if one["tools"] else ("no tools",)),
                )
            ),
            ", ".join(
                f"{place}{name} {used.get(name, 0):.15g} of {limit:.15g}"
                for place, limits, used in _limits_of(one)
                for name, limit in limits.items()
            ),
            "expired" if one["expired"] else one["expires_at"] or "",
            one["last_used_at"] or "",
            one["comment"],
        )
        for one in found["keys"]
    )
    print_rows(headings, rows)


def _limits_of(one: Any) -> Iterator[tuple[str, Any, Any]]:
    """A key's limits with their use: its own limits, its budget, and the limits per model."""
    yield "", one["limits"], one["used"]
    yield "", one["budget"], one["spent"]
    for model, limits in one["model_limits"].items():
        yield f"{model}: ", limits, one["model_used"][model]


@operator_command(keys, "revoke")
def revoke(
    gateway: Operator,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `sluice keys list`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the key's owner; revoke nothing.")] = False,
    yes: Yes = False,
) -> None:
    """Revoke a key: all gateways refuse it within a second; its requests in flight are finished.

    This cannot be undone. Asks first at a terminal.

    Example: sluice keys revoke key_0a1b2c3d4e5f
    """
    shown = f"{key_id} is revoked"
    if dry_run or (sys.stdin.isatty() and not yes):
        owner = _owner(gateway, key_id)
        shown = f"{owner}; not revoked" if dry_run else shown
        confirm(f"revoke {owner}?", yes or dry_run)
    if not dry_run:
        gateway.client().delete(*AT, key_id)
    gateway.show({"id": key_id, "revoked": not dry_run}, lambda _: print_lines(shown))


def _owner(gateway: Operator, key_id: str) -> str:
    """A description of the key in one line. Raises AdminError if no key has that id."""
    for one in gateway.get(*AT)["keys"]:
        if one["id"] == key_id:
            used = one["last_used_at"] or "never"
            return f"{key_id} of {one['tenant']}, {one['role']}, last used {used}"
    raise AdminError(f"{key_id}: no such key; allowed: an id from `sluice keys list`")
