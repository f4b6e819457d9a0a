"""What commands print tables on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ID = "a_name_of_an_adapter_that_is_not_short_at_all_v12"
PRINTED = f"""
from ops.cli.console import screen, table_of
table = table_of(*"abcdefghi")
table.add_row("{ID}", *["x" * 12] * 8)
screen().print(table)
"""


def printed(**environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTED], capture_output=True, text=True, env={**clean, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipe_gets_names_that_can_be_found_in_it() -> None:
    assert ID in printed()


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal_gets_every_character(columns: str) -> None:
    lines = printed(COLUMNS=columns).splitlines()
    assert max(len(line) for line in lines) <= int(columns)
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == ID
