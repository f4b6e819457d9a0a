"""Output of commands: JSON, tables without truncation, text with markup and control characters escaped."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from observability.printable import printable
from ops.client import AdminError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

PIPE_WIDTH: Final = 200
"""Width in characters without a terminal: the widest table has nine columns with an id of 16 characters."""

REDRAWS_PER_S: Final = 4.0  # more redraws per second would disturb a load
LAST_LOOK_S: Final = 5.0  # longest wait for a look that is under way when its block ends


def screen(*, stderr: bool = False) -> Console:
    """A console on standard output or error. For a pipe, rich would assume 80 columns and cut names.

    Some of the text comes from callers, so terminal control characters are escaped.
    """
    from rich.console import Console

    class Screen(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            """Escape the text; rich calls this for every printed text, in a cell or alone."""
            return super().render_str(printable(text, lines=True), **options)

    own = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Screen(width=None if own else PIPE_WIDTH, stderr=stderr, emoji=False)


def progress_bar() -> Progress:
    """A bar on standard error that is removed at its end; without a terminal it writes nothing."""
    from rich.progress import Progress

    console = screen(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def live_line(console: Console, line: Callable[[], RenderableType]) -> Live:
    """What shows ``line`` while its block runs, and nothing without a terminal.

    It is made anew when it is drawn, so that a load which it describes draws nothing itself.
    """
    from rich.live import Live

    return Live(console=console, get_renderable=line, refresh_per_second=REDRAWS_PER_S, transient=True)


@contextmanager
def repeated(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call ``look`` again and again while the block runs, in a thread, to show how far it is."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LAST_LOOK_S)


def table_of(*names: str, right: Iterable[str] = (), **options: Any) -> Table:
    """A table whose cells are wrapped, not cut, on a narrow terminal; ``right``: right-aligned columns."""
    from rich.table import Column, Table

    numbers = set(right)
    columns = (
        Column(name, overflow="fold", justify="right" if name in numbers else "left") for name in names
    )
    return Table(*columns, **options)


def print_rows(
    headings: Sequence[str], rows: Iterable[Iterable[object]], *, stderr: bool = False, **options: Any
) -> None:
    """Print a table; ``options`` are those of :func:`table_of`."""
    table = table_of(*headings, **options)
    for row in rows:
        table.add_row(*map(plain, row))
    screen(stderr=stderr).print(table)


def print_findings(findings: Iterable[tuple[str, str, str, str, str]]) -> None:
    """Print the results of checks: each one's colour, verdict, name, what was found and what to do."""
    from rich.markup import escape

    table = table_of("", "check", "found", "what to do")
    for colour, verdict, *texts in findings:
        table.add_row(f"[{colour}]{verdict}[/]", *map(escape, texts))
    screen().print(table)


def print_json(answer: Any) -> None:
    print_text(json.dumps(answer, ensure_ascii=False, indent=2))


def print_text(text: str, *, file: TextIO | None = None) -> None:
    """Print text without rich, with control characters escaped."""
    print(printable(text, lines=True), file=file)


def write_figures(figures: Any, file: Path | None, *, as_json: bool) -> None:
    """Print figures on standard output with ``as_json``, and write them to ``file`` when one is given.

    Raises OSError.
    """
    if as_json:
        print_json(figures)
    if file is not None:
        file.write_text(json.dumps(figures, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def check_folder(option: str, file: Path | None) -> None:
    """Raise AdminError if the folder of a file that is written at the end is missing."""
    if file is not None and not file.parent.is_dir():
        raise AdminError(f"{option}: no folder {file.parent}")


def print_lines(*lines: str, stderr: bool = False) -> None:
    """Print lines without rich, with control characters escaped, a line end in one too."""
    for line in lines:
        print(printable(line), file=sys.stderr if stderr else None)


def started(rows: Iterator[Any]) -> Iterator[Any]:
    """The rows, of which the first is read now, so that no file is emptied for rows that cannot be had."""
    return chain([*islice(rows, 1)], rows)


@contextmanager
def opened(to: Path | None) -> Iterator[TextIO]:
    """The opened file, or standard output if ``to`` is None. Raises AdminError, also when a write fails."""
    try:
        with nullcontext(sys.stdout) if to is None else to.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AdminError(f"{to or 'standard output'}: cannot be written ({error.strerror})") from None


def plain(text: object) -> str:
    """The text for a table's cell, with markup escaped."""
    from rich.markup import escape

    return escape(printable(str(text)))
