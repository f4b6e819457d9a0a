"""What commands print tables on: nothing that somebody may want to copy is cut."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH: Final = 200
"""Columns where there is no terminal: the widest table has nine columns with an id of 16 characters."""


def screen() -> Console:
    """Standard output. A pipe has no width of its own: rich would take 80 columns and cut names."""
    from rich.console import Console

    own = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if own else PIPE_WIDTH)


def table_of(*names: str, **options: Any) -> Table:
    """A table whose cells go on in the next line where the terminal is too narrow, rather than being cut."""
    from rich.table import Column, Table

    return Table(*(Column(name, overflow="fold") for name in names), **options)
