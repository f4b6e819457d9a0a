"""The whole suite, as ``scripts/test`` runs it: three runs of pytest and the linters.

The runs are forked off one process that has imported everything, as are the processes that they start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from tests.fork_server import ALL, AVAILABLE, ROOT, ForkServer

# Four more processes than cores: many tests wait for processes that they have started. With three more, a quarter of
# the machine was idle.
_PROCESSES = os.environ.get("TEST_WORKERS", str((os.cpu_count() or 1) + 4))
_OPTIONS = "--dist loadgroup --no-loadscope-reorder --durations 20 -m"
_PARALLEL = ("-n", _PROCESSES, *_OPTIONS.split(), "not serial")
_NO_TESTS = 5  # pytest's status
_AGAIN = 5
_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"


class Runs:
    """Runs of pytest. Only all tests are worth importing ahead: ``words`` may name a few, or only serial ones."""

    def __init__(self, words: list[str]) -> None:
        self._fine = (0, _NO_TESTS) if words else (0,)
        self._server = ForkServer.start(tests=ALL) if AVAILABLE and not words else None

    def __call__(self, *words: str) -> int:
        """Run pytest with these words; returns its status, or 0 if the files named have no test of this run."""
        command = ["-m", "pytest", "-q", "--tb=short", *words]
        sys.stdout.flush()
        if self._server is None:
            status = subprocess.call([sys.executable, *command])
        else:
            pid = self._server.fork(command, files={0: 0, 1: 1, 2: 2})
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 0 if status in self._fine else status


def _failed() -> list[str]:
    """The tests that failed in the parallel run, as pytest's cache has them: an id ends with the test's group."""
    failed = json.loads(_FAILED.read_text()) if _FAILED.exists() else ()
    return [test.rpartition("@")[0] or test for test in failed]


def _serial() -> list[str]:
    """The files with serial tests: collecting all again would take longer than some of these tests.

    A Ray cluster measures no time, and comes last: what it leaves behind disturbs no measurement.
    """
    files = [file for file in ROOT.joinpath("tests").rglob("test_*.py") if "mark.serial" in file.read_text()]
    return [
        str(file.relative_to(ROOT))
        for file in sorted(files, key=lambda file: (file.parent.name == "ray", file))
    ]


def main(words: list[str]) -> int:
    with tempfile.TemporaryFile() as log:
        # Types and import rules use one core for a minute, at low priority; their output is shown after the tests.
        check = subprocess.Popen(
            ["nice", "-n", "19", "sh", "scripts/check"], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )
        runs = Runs(words)
        _FAILED.unlink(missing_ok=True)
        status = runs(*_PARALLEL, *words)
        # Up to five tests that failed under load run once more, alone: one cause often fails several tests. Their
        # names are printed, so that they can be fixed; more than five, or a second failure, fail the suite.
        if status == 1 and len(failed := _failed()) <= _AGAIN:
            print("Failed under load, run again alone:", *failed, sep="\n")
            status = runs(*failed)
        status = check.wait() or status
        log.seek(0)
        print("Linters, types and import rules:", log.read().decode(), sep="\n", end="")
    return status or runs("-m", "serial", *(words or _serial()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
