"""`pytest --fast`: runs only tests that start no process, no engine and no server; a guard enforces this.

A test is slow when its file, or a helper that the file imports, starts something (``_STARTS`` finds it in the text); when
one of its fixtures does; when importing the file imports an engine; or when it is marked ``slow``. Slow files are not
even imported, so that the fast ones need neither PyTorch nor a server.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# Packages that take seconds to import.
ENGINES = frozenset({"torch", "transformers", "peft", "vllm", "ray", "numba"})
# The calls by which a test or its helpers start processes and servers.
_STARTS = re.compile(
    r"\b(?:subprocess|multiprocessing|psutil|uvicorn|http\.server|moto\.server|aiohttp\.test_utils"
    r"|start_server|create_server|stand_in\(|serving\(|postgres\(|needs_vllm|EngineClient\()"
)
_ENGINE = re.compile(rf"\b(?:import|from) (?:{'|'.join(sorted(ENGINES))})\b")
_IMPORT = re.compile(r"^(?:from (?P<of>[\w.]+) import (?P<names>[\w, ]*)|import (?P<module>[\w.]+))", re.M)
# Libraries do these once: Python's `platform` runs `uname`, urllib3 tests whether there is IPv6.
_HARMLESS = ("uname", ("::1", 0))
# Modules imported when a process is started without a fork, for which there is no other audit event.
_SPAWN = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"})


@cache
def is_slow_file(test: Path) -> bool:
    """Whether a test file, or the conftest.py of one of its folders, must not be imported."""
    conftests = {folder / "conftest.py" for folder in test.parents if folder.is_relative_to(TESTS)}
    return _is_slow(test, starts=True) or any(
        _is_slow(one, starts=False) for one in conftests if one.is_file()
    )


def is_slow_test(item: pytest.Item) -> bool:
    """Whether a test is slow: by its mark, its file, or one of its fixtures.

    pytest collects a file that the command names, though ``pytest_ignore_collect`` refuses it.
    """
    if item.get_closest_marker("slow") or is_slow_file(item.path):
        return True
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(_starts_something(one.func) for defined in fixtures.values() for one in defined)


@cache
def _starts_something(fixture: Callable[..., Any]) -> bool:
    file = inspect.getsourcefile(fixture)
    if file is None or not Path(file).is_relative_to(TESTS):
        return False
    text = inspect.getsource(fixture)
    return bool(_STARTS.search(text) or _ENGINE.search(text))


def _is_slow(start: Path, *, starts: bool) -> bool:
    """Whether a file or one that it imports, directly or not, imports an engine or (``starts``) starts something."""
    seen, to_do = {start}, [start]
    while to_do:
        file = to_do.pop()
        found = _read(file)
        if found.imports_an_engine or (starts and found.starts_something):
            return True
        to_do += found.imported - seen
        seen |= found.imported
    return False


class Read(NamedTuple):
    """What a file's text shows: the repository's files that it imports at module level, and what it starts."""

    imported: frozenset[Path]
    imports_an_engine: bool
    starts_something: bool  # true only for test files and their helpers


@cache
def _read(file: Path) -> Read:
    text, modules = file.read_text(), set()
    for found in _IMPORT.finditer(text):
        modules.add(found["module"] or found["of"])
        modules.update(f"{found['of']}.{name.strip()}" for name in (found["names"] or "").split(","))
    imported = frozenset(path for module in modules if (path := _file(module)))
    engine = any(module.partition(".")[0] in ENGINES for module in modules)
    is_helper = file.is_relative_to(TESTS) and file.name != "conftest.py"
    return Read(imported, engine, is_helper and bool(_STARTS.search(text)))


@cache
def _file(module: str) -> Path | None:
    """Return the repository's file of a module; None if there is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


class Guard:
    """Refuses new processes and listening sockets once it is created; ``tried`` holds the attempts."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and arguments[0] not in _HARMLESS:
            self._refuse(f"{event} {arguments[:1]!r}")
        elif event == "import" and arguments[0] in _SPAWN:
            self._refuse("a process of multiprocessing")
        elif event == "socket.bind" and isinstance(arguments[1], tuple) and arguments[1] not in _HARMLESS:
            self._refuse(f"a socket bound to {arguments[1]!r}")

    def _refuse(self, what: str) -> None:
        self.tried.append(what)
        raise PermissionError(f"{what}: not in a fast test. Mark it with pytest.mark.slow.")
