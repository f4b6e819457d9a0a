"""The house's own rules, checked in fresh interpreters and by the import linter's contracts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "vllm", "boto3", "transformers", "matplotlib", "redis")


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import gateway.app, gateway.wiring.build, gateway.server",
        "import ops.cli.main",
        "import engine.client",
    ],
)
def test_the_gateway_starts_without_the_heavy_libraries(statement: str) -> None:
    assert not modules_after(statement) & set(HEAVY)


def test_help_does_not_wait_for_the_server_to_be_imported() -> None:
    assert "fastapi" not in modules_after("import ops.cli.main")


def test_package_inits_hold_a_docstring_and_nothing_else() -> None:
    """The import linter does not see imports inside them."""
    for init in ROOT.glob("*/**/__init__.py"):
        if ".venv" in init.parts or "tests" in init.parts:
            continue
        lines = [line for line in init.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert lines and lines[0].startswith('"""') and lines[-1].endswith('"""'), init
        assert not any(line.startswith(("import ", "from ")) for line in lines), init


def test_the_journey_fits_on_a_screen_or_two() -> None:
    source = (ROOT / "gateway" / "journey.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 160


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every tracked file that is text, by its path in the repository."""
    found = {}
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" not in raw[:8192]:
            found[str(path.relative_to(ROOT))] = raw.decode("utf-8", errors="replace")
    return found


def test_reasons_are_written_out_and_not_cited_from_outside_the_repository(texts: dict[str, str]) -> None:
    citation = re.compile(r"\bseeds? [0-9]{3}\b", re.IGNORECASE)
    assert [name for name, text in texts.items() if citation.search(text)] == []
