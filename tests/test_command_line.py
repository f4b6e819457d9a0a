"""The `sluice` command's words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ops.cli.main import hoisted
from tests import fork_server


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["doctor", "--json"], ["doctor", "--json"]),
        (["--json", "doctor"], ["doctor", "--json"]),
        (
            ["--url", "http://x", "--json", "replay", "t.csv"],
            ["replay", "t.csv", "--url", "http://x", "--json"],
        ),
        (["--key=k", "replay", "t.csv"], ["replay", "t.csv", "--key=k"]),
        (["prompts", "--json", "show", "v1"], ["prompts", "show", "v1", "--json"]),
        (["prompts", "--key", "k", "list"], ["prompts", "list", "--key", "k"]),
        (["doctor", "--", "--json"], ["doctor", "--", "--json"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_options_of_all_commands_may_stand_before_or_after_the_word(
    given: list[str], meant: list[str]
) -> None:
    assert hoisted(given) == meant


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["serve", "--help"],
        ["doctor", "--help"],
        ["replay", "--help"],
        ["prompts", "render", "--help"],
    ],
)
def test_help_teaches(words: list[str]) -> None:
    done = fork_server.run([sys.executable, "-m", "ops.cli", *words])
    assert done.returncode == 0
    assert len(done.stdout.split()) > 20


def test_an_unknown_word_is_told_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "ops.cli", "dance"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "dance" in done.stderr and "Traceback" not in done.stderr


def test_the_version_is_an_option_too() -> None:
    asked = [sys.executable, "-m", "ops.cli"]
    option, word = (
        subprocess.run([*asked, how], capture_output=True, text=True, check=True).stdout
        for how in ("--version", "version")
    )
    assert option == word and option.startswith("sluice ")
