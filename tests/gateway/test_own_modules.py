"""Child processes run the product's code, whatever the working folder holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from budgeting.vocabulary import prepare_encode
from engine.client import _child_environment
from engine.own_modules import with_own_modules
from gateway.config.settings import Settings
from gateway.limited.process import LimitedProcess, Limits
from gateway.prompts.bounded_work import ENCODE
from ops.gpus.worker_group import make_worker_group

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "models/demo")
PACKAGES = ("engine", "gateway", "ops")
WHERE = f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)})"


@pytest.fixture
def other_code(tmp_path: Path) -> Path:
    """A folder with packages of the product's names."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the code of the working folder')")
    return tmp_path


def worker_environment() -> Mapping[str, str]:
    with make_worker_group(Settings(), ["0"], "info") as group:
        return group.workers[0].environ


@pytest.mark.parametrize("environment", ["engine", "worker", "other"])
def test_a_child_imports_the_code_of_its_parent_installed_or_not(environment: str, other_code: Path) -> None:
    environ = {
        "engine": _child_environment,
        "worker": worker_environment,
        "other": lambda: with_own_modules(os.environ),
    }[environment]()
    # -S: without the installed packages, as in a checkout that is not installed.
    words = [sys.executable, "-S", "-c", WHERE]
    done = subprocess.run(words, cwd=other_code, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(ROOT / name / "__init__.py") for name in PACKAGES], done.stderr


def test_work_within_limits_is_done_in_a_folder_with_code_of_the_same_names(
    other_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(other_code)
    job = b"\0Count."
    process = LimitedProcess(ENCODE, DEMO, limits=Limits(memory_bytes=1 << 30))
    try:
        assert process.run_blocking(job) == prepare_encode(DEMO)(job)
    finally:
        process.close()
