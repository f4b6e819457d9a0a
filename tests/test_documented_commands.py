"""The commands behind the figures of the README and of docs/performance.md exist, with the options that are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from ops.cli.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/performance.md")
COMMAND = re.compile(r"`(?:python -m )?((?:benchmarks|evaluation)\.\w+)((?: [^`]*)?)`")
SLUICE = re.compile(r"sluice ((?:[a-z-]+ ?)+)[^`\n\"'|,]*")
TEST = re.compile(r"`pytest (tests/\S+\.py) -k (\w+)`")


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def source_of(module: str) -> str:
    """Return the source of a module, or of all files of a package that is run."""
    path = ROOT.joinpath(*module.split("."))
    files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else sorted(path.glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_command_and_its_options_are_there(document: str) -> None:
    commands = COMMAND.findall(text(document))
    assert commands
    for module, words in commands:
        source = source_of(module)
        assert "__main__" in source or (ROOT.joinpath(*module.split(".")) / "__main__.py").is_file(), module
        for option in re.findall(r"--([\w-]+)", words):
            assert re.search(rf"--{option}\b|\b{option.replace('-', '_')}\b", source), f"{module} --{option}"


def test_each_test_that_shows_a_figure_is_there() -> None:
    named = [found for document in DOCUMENTS for found in TEST.findall(text(document))]
    assert named
    for path, word in named:
        assert re.search(rf"def test_\w*{word}", (ROOT / path).read_text(encoding="utf-8")), (path, word)


def test_the_number_of_disconnects_is_the_one_that_is_tested() -> None:
    tested = re.search(r'SLUICE_TEST_DISCONNECTS", "(\d+)"', text("tests/integration/test_under_load.py"))
    row = re.search(r"\| callers who drop the connection under load \| ([\d,]+);", text("README.md"))
    assert tested and row and int(row[1].replace(",", "")) <= int(tested[1])


def test_each_option_of_sluice_that_a_page_or_a_message_names_is_there() -> None:
    sources = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "ops").rglob("*.py")]
    whole, checked = typer.main.get_command(app), 0
    for source in sources:
        for found in SLUICE.finditer(source.read_text(encoding="utf-8")):
            command: Any = whole
            for word in found[1].split():
                if word not in getattr(command, "commands", ()):
                    break
                command = command.commands[word]
            if hasattr(command, "commands") or "allow_extra_args" in command.context_settings:
                continue  # a group, or a command whose options are another program's
            known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", found[0].partition(" -- ")[0]))
            assert named <= known | {"--help"}, f"{source}: {found[0]}"
            checked += len(named)
    assert checked > 50
