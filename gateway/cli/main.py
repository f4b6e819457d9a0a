"""The `sluice` command; each word's work is imported when it is called, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.replay import replay

app = typer.Typer(
    name="sluice",
    help="A gateway in front of GPU workers: prompts, token budgets, admission, routing, accounting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="replay")(replay)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML configuration; default: SLUICE_CONFIG, else ./sluice.yaml if it is there.",
    ),
]


def config_path(given: Path | None) -> Path | None:
    """The configuration file to use: the given one, SLUICE_CONFIG, ./sluice.yaml, or none."""
    if given is not None:
        return given
    if os.environ.get("SLUICE_CONFIG"):
        return Path(os.environ["SLUICE_CONFIG"])
    return Path("sluice.yaml") if Path("sluice.yaml").is_file() else None


@app.command()
def serve(
    config: ConfigFile = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Start the gateway; SIGTERM drains it.

    Every key of the file can be overridden by SLUICE_<SECTION>__<KEY>, e.g. SLUICE_SERVER__PORT=9000,
    and the engine's also by vLLM's names, e.g. MAX_MODEL_LEN=2048.

    Example: sluice serve --config sluice.yaml
    """
    from gateway.cli.serve import serve as run

    raise typer.Exit(run(config_path(config), log_level))


@app.command()
def doctor(
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check configuration, model, engine, state store, ledger, routing, prompts and adapters.

    Loads the model for a moment and generates a few tokens, so it takes a few seconds. Exit code 1 when
    something is wrong; each line says what to do about it.
    """
    from gateway.cli.doctor import doctor as run

    raise typer.Exit(run(config_path(config), as_json=as_json))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("sluice-gateway"))


def hoisted(words: Sequence[str]) -> list[str]:
    """The words with ``--url``, ``--key`` and ``--json`` that stand before the command behind it."""
    before: list[str] = []
    rest = list(words)
    while rest and rest[0].split("=")[0] in ("--url", "--key", "--json"):
        option = rest.pop(0)
        before.append(option)
        if option in ("--url", "--key") and rest:
            before.append(rest.pop(0))
    return [*rest, *before]


def main() -> None:
    """Entry point; a closed pipe and Ctrl-C end without a traceback."""
    try:
        app(hoisted(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
