"""``scripts/test`` with the names of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole import Runs


@pytest.mark.slow
@pytest.mark.parametrize(("marks", "status"), [("serial", 0), ("not serial", 1)])
def test_files_without_a_serial_test_fail_only_by_their_tests(
    tmp_path: Path, marks: str, status: int
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_it() -> None:\n    raise AssertionError\n")
    assert Runs([str(file)])("-p", "no:cacheprovider", "-m", marks, str(file)) == status
