"""Finds the configuration file of a command; prints errors that the operator can correct, one per line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ops.cli.console import print_text

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML configuration; default: SLUICE_CONFIG, else ./sluice.yaml if it exists.",
    ),
]


def config_path(given: Path | None) -> Path | None:
    """The configuration file to use: the given one, SLUICE_CONFIG, ./sluice.yaml, or none."""
    if given is not None:
        return given
    if os.environ.get("SLUICE_CONFIG"):
        return Path(os.environ["SLUICE_CONFIG"])
    return Path("sluice.yaml") if Path("sluice.yaml").is_file() else None


def start_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors inside ``error`` (which may be a group) that the operator can correct."""
    # Imported here, because they are of many packages and `sluice --help` needs none of them.
    from accounting.errors import AccountingError
    from adapters.errors import AdapterError
    from budgeting.errors import BudgetError
    from engine.errors import EngineStartError
    from gateway.config.errors import ConfigError
    from gateway.prompts.versions import PromptFileError
    from gateway.routing.revision import RoutingFileError
    from gateway.weights.errors import FetchError

    kinds = (
        AccountingError, AdapterError, BudgetError, ConfigError, EngineStartError, FetchError,
        PermissionError, PromptFileError, RoutingFileError, TimeoutError,
    )  # fmt: skip
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from start_errors(inner)
    elif isinstance(error, kinds):
        yield error


class NotInstalled(Exception):
    """A package of an extra is missing; the message says what to install."""


def need_modules(*names: str, extra: str) -> None:
    for name in names:
        if find_spec(name) is None:
            raise NotInstalled(f"{name} is not installed: pip install 'sluice-gateway[{extra}]'")


@contextmanager
def one_line_errors(*further: type[Exception], code: int = 1) -> Iterator[None]:
    """Print ``further`` and :func:`start_errors` on standard error, then exit with ``code``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (NotInstalled, *further)):
            lines = [str(error)]
        elif not (lines := [str(fault) for fault in start_errors(error)]):
            raise
        print_errors("\n".join(lines))
        raise typer.Exit(code) from None


def print_errors(text: str, name: str = "sluice") -> None:
    """Print each line on standard error, with the command's name in front."""
    for line in text.split("\n"):
        print_text(f"{name}: {line}", file=sys.stderr)
