"""`sluice prompts`: registered prompt versions, and what would be sent for a request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.console import screen, table_of
from ops.client import DEFAULT_URL, AdminClient, AdminError, AsJson, Key, Url

if TYPE_CHECKING:
    from rich.console import Console

prompts = typer.Typer(
    name="prompts",
    help="Registered prompt versions, and what would be sent for a request.",
    no_args_is_help=True,
)


@prompts.command("list")
def list_versions(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """List the registered prompt versions and the routes that use them."""
    with _told() as console:
        found = AdminClient(url, key).get("admin", "prompts")
        if as_json:
            _print_json(found)
            return
        table = table_of("id", "published", "routes", "sha256")
        for one in found["prompts"]:
            routes = ", ".join(one["routes"]) or "none"
            table.add_row(one["id"], one["published_at"] or "not known", routes, one["sha256"])
        console.print(table)


@prompts.command("show")
def show(
    version: Annotated[str, typer.Argument(metavar="ID", help="A prompt version's id.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show one prompt version: its text as it is sent, its budgets, its hash."""
    with _told() as console:
        found = AdminClient(url, key).get("admin", "prompts", version)
        if as_json:
            _print_json(found)
            return
        budgets = ", ".join(f"{name} {tokens:,}" for name, tokens in found["budgets"].items())
        for name, value in (
            ("id", found["id"]),
            ("sha256", found["sha256"]),
            ("published", found["published_at"] or "not known"),
            ("routes", ", ".join(found["routes"]) or "none"),
            ("budgets", budgets),
            ("reserve", found["reserve"] or "the model's default"),
            ("summarizer", found["summarizer"]),
            ("volatile", found["volatile"] or "as configured"),
        ):
            console.print(f"{name:<11}{value}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{found['stable_text']}", markup=False, highlight=False, soft_wrap=True)


@prompts.command("render")
def render(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A request's body as JSON; - reads standard input.")
    ],
    openai: Annotated[
        bool, typer.Option("--openai", help="The body is one of /v1/chat/completions, not of /v1/generate.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be sent for a request, section by section; generates nothing.

    Example: echo '{"messages":[{"role":"user","content":"hi"}]}' | sluice prompts render -
    """
    with _told() as console:
        try:
            body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
            if openai:
                body = json.dumps({"openai": json.loads(body)}).encode()
        except (OSError, ValueError) as error:
            raise AdminError(f"{file}: {error}") from None
        found = AdminClient(url, key).post("admin", "budget", "preview", body=body)
        if as_json:
            _print_json(found)
        else:
            _print_preview(console, found)


@contextmanager
def _told() -> Iterator[Console]:
    """A console; what the gateway refuses becomes one line and exit code 1."""
    try:
        yield screen()
    except AdminError as error:
        print(f"sluice: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _print_json(found: Any) -> None:
    print(json.dumps(found, ensure_ascii=False, indent=2))


def _print_preview(console: Console, found: Any) -> None:
    table = table_of("section", "tokens", "budget")
    for name, section in found["sections"].items():
        table.add_row(name, f"{section['tokens']:,}", f"{section['budget']:,}")
    table.add_row("generation_reserve", f"{found['generation_reserve']:,}", "")
    table.add_row("in all", f"{found['input_tokens'] + found['generation_reserve']:,}", "")
    version = found["prompt_version"]["id"] if found["prompt_version"] else "none"
    lines = [f"route {found['route']}, prompt version {version}, longest {found['max_model_len']:,} tokens"]
    lines += [f"{name.replace('_', ' ')}: {_listed(cut)}" for name, cut in found["cuts"].items() if cut]
    for one in found["volatile"]["findings"]:
        where = f"in system message {one['system_message']}: {one['action']}"
        lines.append(f"volatile {one['kind']} {one['text']!r} {where}")
    prefix = found["prefix"]
    boundary = (
        f"boundary: {prefix['tokens']:,} tokens above, {prefix['blocks']:,} whole blocks of "
        f"{prefix['block_size']}, fingerprint {prefix['fingerprint'] or 'none'}"
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(found["prompt"]["before_boundary"], markup=False, highlight=False, soft_wrap=True)
    console.rule(boundary, style="bold")
    console.print(found["prompt"]["after_boundary"], markup=False, highlight=False, soft_wrap=True)


def _listed(cut: Any) -> str:
    return ", ".join(cut) if isinstance(cut, list) else str(cut)
