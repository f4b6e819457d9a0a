"""`sluice models`: fetches a model's files before the gateway starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.console import screen
from ops.cli.operator import command_group
from ops.cli.startup import ConfigFile, config_path, one_line_errors

if TYPE_CHECKING:
    from gateway.weights.values import OnProgress

models = command_group("models", "Files of the served model.")


@models.command("fetch")
def fetch(
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(help="A hub id or s3://bucket/prefix in place of engine.model.")
    ] = None,
) -> None:
    """Fetch the files of engine.model and exit: for init containers and image builds.

    Files that are complete are not fetched again; an interrupted fetch is resumed. Prints the folder.

    Example: sluice models fetch --config /etc/sluice/sluice.yaml
    """
    import asyncio

    from gateway.config.errors import ConfigError
    from gateway.config.settings import load_settings
    from gateway.weights.source import prepare

    with one_line_errors():
        settings = load_settings(config_path(config))
        engine = settings.engine
        if model is not None:
            engine = engine.model_copy(update={"model": model})
        _, weights = prepare(engine, settings.weights)
        with _watched(weights.source) as on_progress:
            folder = asyncio.run(weights.fetch(on_progress))
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; see engine.model")
        print(folder)


@contextmanager
def _watched(source: str) -> Iterator[OnProgress]:
    """Show progress on standard error: a bar on a terminal, otherwise occasional log lines."""
    from gateway.weights.progress import LogProgress, bar
    from observability.logs import configure_logging

    console = screen(stderr=True)
    if console.is_terminal:
        with bar(console, source) as on_progress:
            yield on_progress
        return
    logs = configure_logging("info", None)
    try:
        yield LogProgress(source, time.monotonic)
    finally:
        logs.close()
