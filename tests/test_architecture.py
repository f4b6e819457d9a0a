"""The house's own rules, checked in fresh interpreters and by the import linter's contracts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
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


MAX_FUNCTION_LINES = 80
MAX_POSITIONAL = 6


def wiring_nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((ROOT / "gateway" / "wiring").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def test_no_function_of_the_composition_root_is_longer_than_80_lines() -> None:
    for path, node in wiring_nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {lines} lines"


def test_no_call_in_the_composition_root_has_more_than_6_positional_arguments() -> None:
    for path, node in wiring_nodes():
        if isinstance(node, ast.Call):
            place = f"{path.name}:{node.lineno}"
            assert len(node.args) <= MAX_POSITIONAL, f"{place}: {len(node.args)} positional arguments"


def test_no_closure_of_the_composition_root_uses_a_name_that_is_bound_later() -> None:
    """Parts that need each other are connected by an explicit ``attach`` instead."""
    for path, node in wiring_nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for closure, name, bound_at in late_captures(node):
                raise AssertionError(f"{path.name}:{closure}: {name!r} is bound later, in line {bound_at}")


def late_captures(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, int]]:
    """The closures in ``function`` that read a local bound after them: line, name, line of its binding."""
    closures = [
        node
        for node in ast.walk(function)
        if node is not function and isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    inside = {id(node) for closure in closures for node in ast.walk(closure) if node is not closure}
    first_bound: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside:
            first_bound[node.id] = min(node.lineno, first_bound.get(node.id, node.lineno))
    for closure in closures:
        own = {one.arg for one in ast.walk(closure.args) if isinstance(one, ast.arg)}
        for node in ast.walk(closure):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in own:
                bound_at = first_bound.get(node.id, 0)
                if bound_at > (closure.end_lineno or closure.lineno):
                    yield closure.lineno, node.id, bound_at
