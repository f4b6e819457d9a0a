"""Each promise of docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def rows() -> list[list[str]]:
    """Return the cells of each row in the section of promises, without the headings of its tables."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    section = text.partition("\n## Promises\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [one for one in cells if one[0] != "promise" and set(one[0]) != {"-"}]


def test_each_promise_names_the_tests_that_show_it_and_they_exist() -> None:
    found = rows()
    assert len(found) >= 20
    for cells in found:
        assert len(cells) == 3, cells
        shown = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[2])
        assert shown and len(shown) == cells[2].count("`") // 2, cells
        for path, name in shown:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
                f"{path}::{name}"
            )
