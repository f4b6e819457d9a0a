"""`sluice import`: converts configurations of other gateways to Sluice's.

The readers and all settings are imported only when it runs.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.console import plain, print_json, print_text, screen, table_of
from ops.cli.operator import AsJson, command_group
from ops.cli.startup import one_line_errors

if TYPE_CHECKING:
    from ops.importing.values import ImportedSetup

imports = command_group("import", "Convert another gateway's configuration to sluice.yaml and routing.yaml.")
Source = Annotated[Path, typer.Argument(help="The other gateway's file.", show_default=False)]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where both files are written.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
_COLOURS = {"carried": "green", "different": "yellow", "unsupported": "red"}


@imports.command()
def litellm(file: Source, out: Out = Path(), force: Force = False, as_json: AsJson = False) -> None:
    """Import the configuration of LiteLLM's proxy.

    Example: sluice import litellm config.yaml --out .
    """
    from ops.importing.litellm import read_litellm

    _run(lambda: read_litellm(file), file.name, out, force=force, as_json=as_json)


@imports.command(name="vllm-router")
def vllm_router(
    arguments: Annotated[list[str], typer.Argument(help="The router's arguments, after `--`.")],
    out: Out = Path(),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Import the arguments of vLLM's router.

    Example: sluice import vllm-router -- --static-backends http://gpu-1:8000 --static-models llama
    """
    from ops.importing.vllm_router import read_arguments

    _run(lambda: read_arguments(arguments), "vllm-router", out, force=force, as_json=as_json)


@imports.command(name="production-stack")
def production_stack(
    file: Source,
    release: Annotated[
        str, typer.Option(help="The Helm release, whose name is part of the services' names.")
    ] = "vllm",
    out: Out = Path(),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Import the Helm values of vLLM's production stack.

    Example: sluice import production-stack values.yaml --release vllm
    """
    from ops.importing.vllm_router import read_values

    _run(lambda: read_values(file, release), file.name, out, force=force, as_json=as_json)


def _run(read: Callable[[], ImportedSetup], source: str, out: Path, *, force: bool, as_json: bool) -> None:
    from ops.importing.values import ImportOutcome, UnreadableSource
    from ops.importing.writer import write

    with one_line_errors(UnreadableSource, OSError):
        setup = read()
        paths = write(setup, out, source=source, force=force)
    if as_json:
        print_json({"files": [str(path) for path in paths], "notes": [asdict(note) for note in setup.notes]})
        return
    table = table_of("", "setting", "in Sluice, and what to do")
    for outcome in reversed(ImportOutcome):  # what needs work first
        for note in setup.notes:
            if note.outcome is outcome:
                table.add_row(f"[{_COLOURS[outcome]}]{outcome.value}[/]", plain(note.place), plain(note.text))
    screen().print(table)
    counts = Counter(note.outcome for note in setup.notes)
    print_text(", ".join(f"{counts[one]} {one.value}" for one in ImportOutcome))
    folder = "" if out == Path() else f"cd {shlex.quote(str(out))} && "  # routing.file is relative to it
    print_text(f"written: {', '.join(map(str, paths))}; check with: {folder}sluice doctor")
