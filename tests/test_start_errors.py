"""Errors of files that end a start in one line, not in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from gateway.config.settings import Settings
from ops.cli.doctor import files_of_batches
from ops.cli.startup import one_line_errors


def test_a_file_that_this_user_may_not_read_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), one_line_errors():
        raise PermissionError(13, "Permission denied", "/srv/models/demo")
    assert capsys.readouterr().err == "sluice: [Errno 13] Permission denied: '/srv/models/demo'\n"


def test_the_doctor_finds_the_nearest_folder_of_a_path_that_it_cannot_ask_about(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300) / "files"
    settings = Settings.model_validate({"batches": {"folder": str(folder)}, "backends": {}})
    [check] = files_of_batches(settings)
    assert check.ok
