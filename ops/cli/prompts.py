"""`sluice prompts`: shows registered prompt versions, and the prompt that a request would send."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.cli.console import print_lines, print_rows, print_text, screen
from ops.cli.operator import Operator, command_group, operator_command
from ops.client import AdminError

prompts = command_group("prompts", "Registered prompt versions, and the prompt that a request would send.")


@operator_command(prompts, "list")
def list_versions(gateway: Operator) -> None:
    """List the registered prompt versions and the routes that use them."""
    gateway.show(gateway.get("admin", "prompts"), _print_versions)


def _print_versions(found: Any) -> None:
    rows = (
        (one["id"], one["published_at"] or "not known", ", ".join(one["routes"]) or "none", one["sha256"])
        for one in found["prompts"]
    )
    print_rows(("id", "published", "routes", "sha256"), rows)


@operator_command(prompts, "show")
def show(
    gateway: Operator, version: Annotated[str, typer.Argument(metavar="ID", help="A prompt version's id.")]
) -> None:
    """Show one prompt version: its text as it is sent, its budgets, its hash."""
    gateway.show(gateway.get("admin", "prompts", version), _print_version)


def _print_version(found: Any) -> None:
    budgets = ", ".join(f"{name} {tokens:,}" for name, tokens in (found["budgets"] or {}).items())
    facts = (
        ("id", found["id"]),
        ("sha256", found["sha256"]),
        ("published", found["published_at"] or "not known"),
        ("routes", ", ".join(found["routes"]) or "none"),
        ("budgets", budgets or "as configured"),
        ("reserve", found["reserve"] or "the model's default"),
        ("summarizer", found["summarizer"]),
        ("volatile", found["volatile"] or "as configured"),
    )
    print_lines(*(f"{name:<11}{value}" for name, value in facts), "")
    print_text(found["stable_text"])


@operator_command(prompts, "render")
def render(
    gateway: Operator,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A request's body as JSON; - reads standard input.")
    ],
    openai: Annotated[
        bool, typer.Option("--openai", help="The body is for /v1/chat/completions, not for /v1/generate.")
    ] = False,
) -> None:
    """Show the prompt that a request would send, section by section; generates nothing.

    Example: echo '{"messages":[{"role":"user","content":"hi"}]}' | sluice prompts render -
    """
    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        if openai:
            body = json.dumps({"openai": json.loads(body)}).encode()
    except (OSError, ValueError) as error:
        raise AdminError(f"{file}: {getattr(error, 'strerror', error)}") from None
    gateway.show(gateway.client().post("admin", "budget", "preview", body=body), _print_preview)


def _print_preview(found: Any) -> None:
    rows = [
        *(
            (name, f"{one['tokens']:,}", "" if one["budget"] is None else f"{one['budget']:,}")
            for name, one in found["sections"].items()
        ),
        ("generation_reserve", f"{found['generation_reserve']:,}", ""),
        ("total", f"{found['input_tokens'] + found['generation_reserve']:,}", ""),
    ]
    version = found["prompt_version"]["id"] if found["prompt_version"] else "none"
    lines = [f"route {found['route']}, prompt version {version}, at most {found['max_model_len']:,} tokens"]
    lines += [f"{name.replace('_', ' ')}: {_listed(cut)}" for name, cut in found["cuts"].items() if cut]
    for one in found["volatile"]["findings"]:
        where = f"in system message {one['system_message']}: {one['action']}"
        lines.append(f"volatile {one['kind']} {one['text']!r} {where}")
    prefix = found["prefix"]
    boundary = (
        f"boundary: {prefix['tokens']:,} tokens above, {prefix['blocks']:,} whole blocks of "
        f"{prefix['block_size']}, fingerprint {prefix['fingerprint'] or 'none'}"
    )
    print_lines(*lines)
    print_rows(("section", "tokens", "budget"), rows)
    print_text(found["prompt"]["before_boundary"])
    screen().rule(boundary, style="bold")
    print_text(found["prompt"]["after_boundary"])


def _listed(cut: Any) -> str:
    return ", ".join(cut) if isinstance(cut, list) else str(cut)
