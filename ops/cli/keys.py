"""`sluice keys`: make, list, change and revoke the keys of callers and operators."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ops.cli.console import print_lines, print_rows
from ops.cli.operator import Operator, Yes, command_group, confirm, given, operator_command, pairs
from ops.cli.startup import print_errors
from ops.client import AdminError

AT = ("admin", "keys")
# Short names of the limits on the command line.
SHORT = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "tpd": "tokens_per_day"}
BUDGET = ("usd_per_day", "usd_per_month")

# What `--remove` takes: a field of the key, and the limit within it.
REMOVED = {
    **{short: ("limits", name) for short, name in SHORT.items()},
    **{name: ("budget", name) for name in BUDGET},
    **{name: (name, None) for name in ("routes", "adapters", "models", "aliases", "model_limits")},
    "expires": ("expires_at", None),
}
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `sluice keys list`.")]

keys = command_group("keys", "Keys of callers and operators: create, list, change, revoke.")


@dataclass(frozen=True, slots=True)
class Granted:
    """The options of what a key may do, for a new key and for a change."""

    max_priority: Annotated[
        int | None,
        typer.Option(min=-1, max=1, help="Higher priorities are lowered to this; default: 0, for a front 1."),
    ] = None
    rpm: Annotated[int | None, typer.Option(min=1, help="Limit of requests per minute.")] = None
    tpm: Annotated[int | None, typer.Option(min=1, help="Limit of tokens per minute.")] = None
    tpd: Annotated[int | None, typer.Option(min=1, help="Limit of tokens per day.")] = None
    usd_per_day: Annotated[float | None, typer.Option(help="Budget of US dollars per day (UTC).")] = None
    usd_per_month: Annotated[
        float | None, typer.Option(help="Budget of US dollars per calendar month (UTC).")
    ] = None
    route: Annotated[
        list[str] | None, typer.Option(help="A route that the key may use, repeatable; default: all.")
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter or alias that the key may use, repeatable; default: all."),
    ] = None
    tools: Annotated[
        bool | None, typer.Option("--tools/--no-tools", help="Whether the key's requests may have tools.")
    ] = None
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use, repeatable; default: all.")
    ] = None
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="The key's own name for a model, repeatable."),
    ] = None
    model_limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL:LIMIT=N",
            help=f"A limit for one model ({', '.join((*SHORT, *BUDGET))}), repeatable.",
        ),
    ] = None
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="End of the key: ISO 8601 with an offset, as 2027-01-31T00:00:00Z."
        ),
    ] = None
    comment: Annotated[
        str | None, typer.Option("--comment", "--message", "-m", help="The purpose of the key.")
    ] = None

    @property
    def body(self) -> dict[str, Any]:
        """The fields that are given."""
        fields = {
            "max_priority": self.max_priority,
            "routes": self.route or None,
            "adapters": self.adapter or None,
            "tools": self.tools,
            "models": self.model or None,
            "aliases": pairs("--alias", self.alias) if self.alias else None,
            "limits": given(requests_per_minute=self.rpm, tokens_per_minute=self.tpm, tokens_per_day=self.tpd)
            or None,
            "budget": given(usd_per_day=self.usd_per_day, usd_per_month=self.usd_per_month) or None,
            "model_limits": _model_limits(self.model_limit) if self.model_limit else None,
            "expires_at": self.expires,
            "comment": self.comment,
        }
        return given(**fields)


@operator_command(keys, "create")
def create(
    gateway: Operator,
    tenant: Annotated[
        str, typer.Argument(metavar="TENANT", help="The tenant that its requests are billed to.")
    ],
    granted: Granted,
    role: Annotated[
        str,
        typer.Option(help="caller, viewer, operator, admin, or front (another Sluice, which names tenants)."),
    ] = "caller",
    org: Annotated[str | None, typer.Option(help="The tenant's organization, for reports.")] = None,
) -> None:
    """Create a key and print it: it is shown only once, and stored only as a hash.

    Standard output has only the key; everything else goes to standard error.

    Example: sluice keys create acme --rpm 600 --route self_hosted_generation
    """
    made = gateway.post(*AT, tenant=tenant, org=org, role=role, **granted.body)
    gateway.show(made, _print_key, has=("key",))


@operator_command(keys, "change")
def change(
    gateway: Operator,
    key_id: KeyId,
    granted: Granted,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"What no longer restricts the key, repeatable: {', '.join(REMOVED)}.",
        ),
    ] = None,
) -> None:
    """Change what a key may do; the key itself, its tenant and its role stay.

    What is not given stays. Lists replace the key's own; so do aliases, and limits for models. All gateways
    have the change within a second; requests in flight end as they began.

    Example: sluice keys change key_0a1b2c3d4e5f --tpm 200000 --remove rpm
    """
    fields = granted.body
    for name in dict.fromkeys(remove or ()):
        if name not in REMOVED:
            raise AdminError(f"--remove {name!r}; allowed: {', '.join(REMOVED)}")
        field, inner = REMOVED[name]
        if (inner or field) in (fields.get(field, {}) if inner else fields):
            raise AdminError(f"--remove {name}: the command also sets it; allowed: one of both")
        if inner:
            fields.setdefault(field, {})[inner] = None
        else:
            fields[field] = {} if field in ("aliases", "model_limits") else None
    gateway.show(gateway.client().patch(*AT, key_id, body=fields), _print_changed, has=("id",))


def _print_changed(changed: Any) -> None:
    _print_keys({"keys": [changed]})
    _print_warnings(changed)


def _print_warnings(answer: Any) -> None:
    for warning in answer.get("warnings", ()):
        print_errors(f"warning: {warning}")


def _print_key(made: Any) -> None:
    print(made["key"])
    print(
        f"{made['id']} for {made['tenant']}, {made['role']}; store the key now, it is not shown again",
        file=sys.stderr,
    )
    _print_warnings(made)


def _model_limits(given: Sequence[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for text in given:
        model, _, limit = text.rpartition(":")
        name, _, amount = limit.partition("=")
        try:
            most = int(amount) if amount.isdecimal() else float(amount)
            found.setdefault(model, {})[SHORT.get(name, name)] = most
        except ValueError:
            model = ""
        if not model or name not in (*SHORT, *SHORT.values(), *BUDGET):
            limits = ", ".join((*SHORT, *BUDGET))
            raise AdminError(
                f"--model-limit {text!r}; allowed: MODEL:LIMIT=N, as qwen3-8b:tpm=100000; limits: {limits}"
            )
    return found


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
    key_id: KeyId,
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
        gateway.client().delete(*AT, key_id, status=204)
    gateway.show({"id": key_id, "revoked": not dry_run}, lambda _: print_lines(shown))


def _owner(gateway: Operator, key_id: str) -> str:
    """A description of the key in one line. Raises AdminError if no key has that id."""
    for one in gateway.get(*AT)["keys"]:
        if one["id"] == key_id:
            used = one["last_used_at"] or "never"
            return f"{key_id} of {one['tenant']}, {one['role']}, last used {used}"
    raise AdminError(f"{key_id}: no such key; allowed: an id from `sluice keys list`")
