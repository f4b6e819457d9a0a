"""`sluice evaluate`: makes signed evaluation reports, which promotions and canaries may require."""

from importlib import import_module
from typing import Any

import typer

from ops.cli.operator import command_group
from ops.cli.startup import one_line_errors

# The evaluations parse their own options; --help of each shows them.
OWN_OPTIONS: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}

evaluate = command_group("evaluate", "Compare a new version with the served one; write signed reports.")


@evaluate.command("adapter", context_settings=OWN_OPTIONS)
def adapter(context: typer.Context) -> None:
    """Compare a LoRA adapter's new version with the served one; --post stores the report with it."""
    _run("evaluation.adapter_regression.__main__", context)


@evaluate.command("variant", context_settings=OWN_OPTIONS)
def variant(context: typer.Context) -> None:
    """Compare two backends of a gateway, e.g. a quantized variant and the model; --post stores the report."""
    _run("evaluation.quantization_eval.__main__", context)


def _run(module: str, context: typer.Context) -> None:
    with one_line_errors(ModuleNotFoundError):
        # Imported by name: the package ``evaluation`` depends on these commands, not the other way round.
        code = import_module(module).main(context.args)
    raise typer.Exit(code)
