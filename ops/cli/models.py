"""`sluice models`: bring a model's files before the gateway starts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gateway.weights.values import OnProgress

models = typer.Typer(name="models", help="The served model's files.", no_args_is_help=True)


@models.command("fetch")
def fetch(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="As for serve: default SLUICE_CONFIG, else ./sluice.yaml."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A hub id or s3://bucket/prefix in place of engine.model.")
    ] = None,
) -> None:
    """Fetch the files of engine.model, and end: for init containers and image builds.

    What is there is not fetched again; a fetch that was broken off goes on. Prints the folder.

    Example: sluice models fetch --config /etc/sluice/sluice.yaml
    """
    from gateway.config.settings import load_settings
    from gateway.weights.source import prepare
    from ops.cli.config_path import config_path
    from ops.cli.startup import start_errors

    try:
        settings = load_settings(config_path(config))
        if model is not None:
            engine = settings.engine.model_copy(update={"model": model})
            settings = settings.model_copy(update={"engine": engine})
        _, weights = prepare(settings)
        with _watched(weights.source) as on_progress:
            folder = asyncio.run(weights.fetch(on_progress))
    except Exception as error:
        reported = [str(fault) for fault in start_errors(error)]
        if not reported:
            raise
        print("\n".join(f"sluice: {line}" for line in reported), file=sys.stderr)
        raise typer.Exit(1) from None
    if not folder.is_dir():
        print(f"sluice: {folder}: no such folder; see engine.model", file=sys.stderr)
        raise typer.Exit(1)
    print(folder)


@contextmanager
def _watched(source: str) -> Iterator[OnProgress]:
    """A bar on a terminal, a log line now and then elsewhere; both on standard error."""
    from rich.console import Console

    from gateway.weights.progress import LogProgress, bar
    from observability.logs import configure_logging

    console = Console(stderr=True)
    if console.is_terminal:
        with bar(console, source) as on_progress:
            yield on_progress
        return
    logs = configure_logging("info", None)
    try:
        yield LogProgress(source, time.monotonic)
    finally:
        logs.close()
