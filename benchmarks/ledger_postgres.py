"""A temporary PostgreSQL server: created in a folder, started, crashed and started again."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Debian's location of the programs; elsewhere they are on the path.
PLACES = "/usr/lib/postgresql/*/bin/initdb"
WAIT_S = 60


class NoPostgres(Exception):
    """PostgreSQL's programs are not installed on this machine."""


@dataclass(frozen=True, slots=True)
class Postgres:
    """A server on a free port of this machine, with one database that needs no password."""

    programs: Path
    folder: Path
    port: int
    user: str | None

    @property
    def url(self) -> str:
        """Return the ledger's URL of the database."""
        return f"postgresql+asyncpg://sluice@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", self._data, "-o", options, "-l", log, "-w", "-t", str(WAIT_S), "start")

    def crash(self) -> None:
        """Stop at once, as a power cut would."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "-t", str(WAIT_S), "stop")

    def make(self) -> None:
        """Create the database cluster."""
        self._run("initdb", "-D", self._data, "-U", "sluice", "-A", "trust", "-E", "UTF8", "--no-sync")

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [str(self.programs / program), *words],
            user=self.user,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S + 10,
        )
        if done.returncode:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")


def programs() -> Path:
    """The folder of PostgreSQL's programs. Raises NoPostgres."""
    found = sorted(Path("/").glob(PLACES.lstrip("/"))) or [Path(shutil.which("initdb") or "/nowhere")]
    if not found[-1].exists():
        raise NoPostgres(f"initdb is neither on the path nor at {PLACES}; install PostgreSQL")
    return found[-1].parent


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a server, and remove it with its data afterwards. Raises NoPostgres."""
    place = programs()
    folder = Path(tempfile.mkdtemp(prefix="sluice-pg-"))
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = _somebody()
        shutil.chown(folder, user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Postgres(place, folder, port, user)
    try:
        server.make()
        server.start()
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # the server may be stopped already
            server.crash()
        shutil.rmtree(folder, ignore_errors=True)


def _somebody() -> str:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise NoPostgres("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
