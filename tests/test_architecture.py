"""The repository's own rules, checked in fresh interpreters and by the import linter's contracts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.fast import is_slow_test

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "accounting", "adapters", "admission", "budgeting", "engine", "gateway", "observability", "ops", "resilience",
)  # fmt: skip
# Entries of the repository's root. A new one is a decision: name it here, in CONTRIBUTING.md and in pyproject.toml.
TOP = frozenset(
    {
        *PRODUCT, "evaluation", "benchmarks", "models", "tests", "prompts", "deploy", "docs", "scripts", ".ci",
        "constraints", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
        "adapters.yaml", "pyproject.toml", "routing.yaml", "sluice.yaml",
    }
)  # fmt: skip
GATEWAY_FILES = frozenset(
    {"__init__.py", "app.py", "errors.py", "journey.py", "ports.py", "py.typed", "server.py", "testing.py"}
)
# Names that several public classes of the product share. The set may only become smaller.
NAMES_OF_TWO_THINGS: frozenset[str] = frozenset()
HEAVY = ("torch", "vllm", "boto3", "botocore", "transformers", "matplotlib", "ray", "redis")
# The first imports of the product's processes, in the order in which one fresh process imports them.
STARTS = (
    "engine.client",
    "ops.cli.main",
    "gateway.server",
    "gateway.app, gateway.wiring.build, ops.ray.ingress",
)


@cache
def modules_after() -> dict[str, set[str]]:
    """Return the modules that are loaded after each of ``STARTS``."""
    steps = "; ".join(f"import {start}; print(*sys.modules)" for start in STARTS)
    code = [sys.executable, "-c", f"import sys; {steps}"]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=True)
    return {start: set(line.split()) for start, line in zip(STARTS, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("start", STARTS)
def test_the_gateway_starts_without_the_heavy_libraries(start: str) -> None:
    assert not modules_after()[start] & set(HEAVY)


def test_help_waits_for_neither_the_server_nor_the_settings_to_be_imported() -> None:
    assert not modules_after()["ops.cli.main"] & {"fastapi", "pydantic", "sqlalchemy"}


def test_package_inits_hold_a_docstring_and_nothing_else() -> None:
    """The import linter does not see imports inside package inits."""
    inits = [path for path in tracked_files() if path.name == "__init__.py" and "tests" not in path.parts]
    assert len(inits) > 30
    for init in inits:
        lines = [line for line in init.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert lines and lines[0].startswith('"""') and lines[-1].endswith('"""'), init
        assert not any(line.startswith(("import ", "from ")) for line in lines), init


def test_the_journeys_file_is_shorter_than_170_lines() -> None:
    source = (ROOT / "gateway" / "journey.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 170


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
    """Yield the closures in ``function`` that read a local bound after them: line, name, line of its binding."""
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


@pytest.fixture(scope="module")
def product(texts: dict[str, str]) -> dict[str, ast.Module]:
    """The parsed modules of the product, by their path in the repository."""
    return {
        name: ast.parse(text)
        for name, text in texts.items()
        if name.endswith(".py") and name.split("/")[0] in PRODUCT
    }


def layers(contract_id: str) -> list[str]:
    """Return the layers of one import contract, highest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in project["tool"]["importlinter"]["contracts"] if c.get("id") == contract_id]
    return list(contract["layers"])


def test_the_top_of_the_repository_holds_what_is_named_and_nothing_else() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} <= TOP


def test_the_root_of_the_gateway_has_eight_files_and_the_rooms_of_the_contract() -> None:
    inside = [
        path.relative_to(ROOT / "gateway").parts
        for path in tracked_files()
        if path.is_relative_to(ROOT / "gateway")
    ]
    assert {parts[0] for parts in inside if len(parts) == 1} == GATEWAY_FILES
    rooms = {room for layer in layers("rooms") for room in layer.split(" | ")}
    assert {parts[0] for parts in inside if len(parts) > 1} - {"bundled"} == rooms - {
        file.removesuffix(".py") for file in GATEWAY_FILES
    }


def test_a_public_class_name_stands_for_one_thing(product: dict[str, ast.Module]) -> None:
    names = Counter(
        node.name
        for module in product.values()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, times in names.items() if times > 1} == NAMES_OF_TWO_THINGS


def test_no_modules_import_each_other_in_a_circle_not_for_types_either(
    product: dict[str, ast.Module],
) -> None:
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in product}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imports = [node for node in ast.walk(product[path]) if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{one.name}" for node in imports for one in node.names}
        graph[module] = modules.keys() & (named | {str(node.module) for node in imports})
    assert sum(map(len, graph.values())) > len(graph), "the imports are found"
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def hidden_names(file: ast.Module) -> Iterator[str]:
    """Yield the names in a class's annotations that stand for a member of the class since Python 3.14 (PEP 649)."""
    for body in (node.body for node in ast.walk(file) if isinstance(node, ast.ClassDef)):
        functions = [one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        fields = [one for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        members = {one.name for one in functions} | {ast.unparse(one.target) for one in fields}
        taken = [one.returns for one in functions] + [one.annotation for one in fields]
        for function in functions:
            arguments = function.args
            every = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
            taken += [argument.annotation for argument in every]
        for node in (node for annotation in taken if annotation for node in ast.walk(annotation)):
            if isinstance(node, ast.Name) and node.id in members:
                yield node.id


def test_no_member_of_a_class_hides_a_name_of_its_annotations(product: dict[str, ast.Module]) -> None:
    found = {name: names for name, file in product.items() if (names := list(hidden_names(file)))}
    assert found == {}


def test_no_file_of_the_product_has_a_note_of_open_work(texts: dict[str, str]) -> None:
    to_do = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    assert [
        name for name, text in texts.items() if name.split("/")[0] in PRODUCT and to_do.search(text)
    ] == []


@pytest.mark.parametrize("contract_id", ["packages", "rooms"])
@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/decisions/014-rooms-and-their-order.md"])
def test_the_map_for_readers_is_the_list_that_the_import_linter_checks(page: str, contract_id: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.search(rf"<!-- {contract_id} -->\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None, f"{page} has no block {contract_id}"
    shown = [
        re.split(r"\s{2,}", line)[0].strip() for line in block[1].splitlines() if line and line[0] != " "
    ]
    assert shown == layers(contract_id)


def test_there_are_at_least_eight_import_contracts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(project["tool"]["importlinter"]["contracts"]) >= 8


def named_files(page: str, text: str, tops: set[str]) -> Iterator[Path]:
    """Yield the files that a document links or names in backticks by their path in the repository."""
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            yield Path(page).parent / link
    for name in re.findall(r"`([\w-][\w./-]*\w)/?`", text):
        if "/" in name and name.split("/")[0] in tops:
            yield Path(name)


def test_documents_name_only_files_that_there_are(texts: dict[str, str]) -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    pages = {name: text for name, text in texts.items() if name.endswith(".md")}
    named = [(page, path) for page, text in pages.items() for path in named_files(page, text, tops)]
    assert [(page, str(path)) for page, path in named if not (ROOT / path).exists()] == []


def test_inside_the_gateway_only_the_server_and_the_wiring_itself_import_the_wiring() -> None:
    importing = re.compile(r"^\s*(?:from|import) gateway\.wiring", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gateway").rglob("*.py")
        if path.parent.name != "wiring" and importing.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"gateway/server.py"}


def test_a_test_of_a_file_that_starts_processes_is_not_fast_even_if_the_command_names_the_file(
    request: pytest.FixtureRequest,
) -> None:
    assert is_slow_test(request.node)
