"""Runs the commands of ``docs/operations.md`` unchanged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- test: (?P<name>[\w-]+) -->\n```sh\n(?P<commands>.*?)```", re.DOTALL)


def documented() -> dict[str, str]:
    """The tested blocks of commands, by the name in the comment before each."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return {found["name"]: found["commands"] for found in BLOCK.finditer(text)}


def run_documented(name: str, *needs: str, path: str = "", **environ: str) -> str:
    """Output of the block; skips the test if a program of ``needs`` is not installed."""
    folders = f"{path}:{os.environ['PATH']}"
    for program in needs:
        if shutil.which(program, path=folders) is None:
            pytest.skip(f"{program} is not installed: scripts/test-env installs it by apt-get")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", documented()[name]],
        env={**os.environ, "PATH": folders, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
