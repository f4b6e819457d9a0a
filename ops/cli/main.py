"""The `sluice` command; a subcommand imports its implementation when it is called, so `--help` is fast."""

import errno
import gc
import inspect
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ops.cli.adapters import adapters
from ops.cli.admission import admission
from ops.cli.batch import batch
from ops.cli.cache import cache
from ops.cli.canary import canary
from ops.cli.chaos import chaos
from ops.cli.cost import cost
from ops.cli.drain import drain
from ops.cli.evaluate import evaluate
from ops.cli.imports import imports
from ops.cli.interrupts import ended_by_ctrl_c
from ops.cli.keys import keys
from ops.cli.models import models
from ops.cli.operator import AsJson, with_options
from ops.cli.prompts import prompts
from ops.cli.ray import ray
from ops.cli.replay import replay
from ops.cli.rollout import rollout
from ops.cli.routes import audit, routes
from ops.cli.sagemaker import sagemaker
from ops.cli.shadow import shadow
from ops.cli.startup import ConfigFile, config_path, print_errors
from ops.cli.usage import usage
from ops.planning.options import PlanOptions


class Commands(TyperGroup):
    """The commands; a wrong value of an option is part of the message, which typer leaves out."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            reported: list[Any] = getattr(error.__cause__, "errors", list)()
            given = (one["input"] for one in reported if one["type"] != "value_error")
            error.message += "".join(f"; given: {value!r}" for value in given)
            raise


app = typer.Typer(
    name="sluice",
    cls=Commands,
    help="A gateway in front of GPU workers: prompts, token budgets, admission, routing, accounting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (replay, chaos, cost, drain):
    app.command(name=command.__name__)(command)
for group in (
    prompts, admission, routes, audit, canary, rollout, shadow, adapters, evaluate, keys, usage, ray, models,
    sagemaker, imports, cache, batch,
):  # fmt: skip
    app.add_typer(group)


@app.command()
def serve(
    config: ConfigFile = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Start a worker process behind this gateway for each GPU: `all`, or indices as in 0,1."
        ),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A running worker, in place of a configuration file; repeatable."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Start this many worker processes, on a machine without GPUs."),
    ] = None,
) -> None:
    """Start the gateway; SIGTERM drains it.

    Every key of the file can be overridden by SLUICE_<SECTION>__<KEY>, e.g. SLUICE_SERVER__PORT=9000,
    and the engine's also by vLLM's names, e.g. MAX_MODEL_LEN=2048.

    Example: sluice serve --config sluice.yaml
    """
    gc.disable()  # garbage collection takes a sixth of the import time and frees nothing
    with ended_by_ctrl_c():
        from ops.cli.serve import end_process
        from ops.cli.serve import serve as run
    gc.enable()
    path = config_path(config)
    if worker and config is not None:
        raise typer.BadParameter(
            "--worker replaces --config: give one of them; `sluice init --worker URL` writes a file"
        )
    end_process(run(path, log_level, gpus=gpus, workers=workers, urls=worker or ()))


@app.command()
def init(
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A running worker, as http://HOST:8001; repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing sluice.yaml.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a first sluice.yaml: for running workers, or with the demo model.

    Example: sluice init --worker http://127.0.0.1:8001
    """
    with ended_by_ctrl_c():
        from ops.cli.init import init as run
    run(worker or (), force=force, as_json=as_json)


@app.command()
@with_options()
def doctor(
    config: ConfigFile = None,
    as_json: AsJson = False,
    plan: Annotated[bool, typer.Option("--plan", help="Check nothing; compute what fits on a GPU.")] = False,
    *,
    options: PlanOptions,
) -> None:
    """Check configuration, model, engine, state store, ledger, routing, prompts and adapters.

    Loads the model and generates a few tokens, so it takes a few seconds. Exit code 1 if a check fails;
    each line says what to do about it.

    With --plan it loads nothing: it computes from the configuration how many sequences fit on a GPU.

    Example: sluice doctor --plan --model llama-3-8b-awq --gpu A10G
    """
    if plan:
        from ops.cli.plan import plan as run_plan

        run_plan(config_path(config), options, as_json=as_json)
        raise typer.Exit
    if options != PlanOptions():
        raise typer.BadParameter("--model, --gpu and the other options of a plan need --plan")
    with ended_by_ctrl_c():
        from ops.cli.doctor import doctor as run
    raise typer.Exit(run(config_path(config), as_json=as_json))


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    found = installed("sluice-gateway")
    typer.echo(json.dumps({"version": found}) if as_json else f"sluice {found}")


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A gateway in front of GPU workers: prompts, token budgets, admission, routing, accounting."""


def unwrap_help(group: typer.Typer) -> None:
    """Join the lines of each paragraph in the help of all commands, so that the terminal's width wraps it.

    Typer keeps the line ends of docstrings. Paragraphs after a backspace and with indented lines stay.
    """
    for command in group.registered_commands:
        paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        kept = ("\b", "\n ")
        command.help = "\n\n".join(
            text if any(mark in text for mark in kept) else " ".join(text.split("\n")) for text in paragraphs
        )
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            unwrap_help(inner.typer_instance)


unwrap_help(app)


def hoisted(words: Sequence[str]) -> list[str]:
    """The arguments with ``--url``, ``--key`` and ``--json`` moved to the end."""
    options: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        kept = options if word.split("=")[0] in ("--url", "--key", "--json") else others
        kept.append(word)
        if word in ("--url", "--key") and rest:
            kept.append(rest.pop(0))
    return [*others, *options, *rest]


def main() -> None:
    """Entry point; a closed pipe ends the command with 1, Ctrl-C with 130."""
    try:
        try:
            app(hoisted(sys.argv[1:]))
        finally:
            print(end="", flush=True)  # when Python exits, an error would have a traceback
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        if error.errno == errno.ENOSPC:
            print_errors(f"the output could not be written: {error.strerror}")
        # Python writes the rest when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
