"""The consoles on which commands print tables and texts."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ops.cli.console import print_json, print_lines, print_rows, screen, table_of
from ops.cli.routes import MAX_SHOWN, _print_done, print_changes
from ops.cli.startup import print_errors
from tests import fork_server

ID = "a_name_of_an_adapter_that_is_not_short_at_all_v12"
PRINTED = f"""
from ops.cli.console import screen, table_of
table = table_of(*"abcdefghi")
table.add_row("{ID}", *["x" * 12] * 8)
screen().print(table)
"""


def printed(**environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return fork_server.run([sys.executable, "-c", PRINTED], env={**clean, **environment}, check=True).stdout


def test_a_pipe_gets_names_unbroken() -> None:
    assert ID in printed()


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal_gets_every_character(columns: str) -> None:
    lines = printed(COLUMNS=columns).splitlines()
    assert max(len(line) for line in lines) <= int(columns)
    cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(cells) == ID


HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\x7fd\u202ee\u2066f\ud800g\rh"
SHOWN = r"a\u001b]0;title\u0007b\u009b2Jc\u007fd\u202ee\u2066f\ud800g\u000dh"


def test_what_a_terminal_acts_upon_is_escaped_wherever_a_command_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = screen()
    print_rows(("heading",), [[HOSTILE]])
    table = table_of("heading")
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE)
    print_lines(HOSTILE)
    print_json({"name": HOSTILE})
    print_errors(HOSTILE)
    out, err = capsys.readouterr()
    assert out.count(SHOWN) == 4 and err == f"sluice: {SHOWN}\n"
    answer = json.loads(out[out.index("{") :])
    assert answer == {"name": HOSTILE}
    assert not set(out + err) & set(HOSTILE) - set(SHOWN) - {"\n"}


def test_a_name_between_colons_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(("id",), [["acme:key:1"]])
    print_lines("acme:key:1")
    assert capsys.readouterr().out.count("acme:key:1") == 2


def test_a_callers_text_cannot_look_like_another_line_of_output(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines("comment\nrevision 9 is in force")
    print_rows(("heading",), [["comment\nrevision 9 is in force"]])
    print_errors("refused: given x\x85sluice: done")
    out, err = capsys.readouterr()
    assert out.count(r"comment\u000arevision 9 is in force") == 2
    assert err == "sluice: refused: given x\\u0085sluice: done\n"


def test_letters_of_every_script_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines("Grüße、漫画\u3000ベルセルク 👩\u200d🚀")
    assert capsys.readouterr().out == "Grüße、漫画\u3000ベルセルク 👩\u200d🚀\n"


def test_of_many_changed_routes_the_first_are_printed_and_the_rest_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_changes([{"path": f"route_{n}", "before": 0, "after": n} for n in range(MAX_SHOWN + 1_500)])
    printed = capsys.readouterr().out
    assert f"route_{MAX_SHOWN - 1} " in printed and f"route_{MAX_SHOWN} " not in printed
    assert printed.endswith("and 1,500 more; --json has them all\n")


def test_a_revision_that_differs_by_its_comment_alone_is_not_called_the_old_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_done({"changes": [], "revision": 3, "parent": 2})
    assert (
        capsys.readouterr().out == "no differences\nthe configuration is the same; revision 3 is in force\n"
    )
