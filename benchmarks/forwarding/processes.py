"""Starts and ends the processes of a run, each on its core."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.forwarding.gateways import KEY, REPOSITORY, python_module
from benchmarks.forwarding.loops import Job, Result

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_EVERY_S = 0.1
# Above every process that is not real-time; the kernel keeps a twentieth of each second for the others.
REALTIME_PRIORITY = "5"
LOG_LINES = 20
LOG_LINE_CHARACTERS = 400


class Broken(Exception):
    """A process of the run failed; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of each process: the gateway has one of its own, worker and load generator use the others.

    Each attribute is the prefix of a command that runs there.
    """

    gateway: tuple[str, ...]
    worker: tuple[str, ...]
    load: tuple[str, ...]

    @classmethod
    def here(cls, *, realtime: bool = False) -> Cores:
        """Return the cores of this machine; with ``realtime`` the processes have priority over all others.

        Raises:
            Broken: the machine has only one core.
        """
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise Broken("two cores are needed: one for the gateway, one for the worker and the load")
        first = ("chrt", "--fifo", REALTIME_PRIORITY) if realtime else ()
        gateway, worker, load = (
            (*first, "taskset", "-c", str(core))
            for core in (cores[-1], cores[0], cores[1] if len(cores) > 2 else cores[0])
        )
        return cls(gateway, worker, load)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with its output in ``log``; end it with its children after the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(STOP_TIMEOUT_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def wait_until_ready(
    process: subprocess.Popen[bytes], port: int, path: str, log: Path, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Wait until ``path`` answers 200.

    Raises:
        Broken: the process ended, or gave no answer in that time.
    """
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise Broken(f"ended with exit code {process.returncode} before it was ready:\n{_tail(log)}")
        try:
            if ask(port, "GET", path)[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(POLL_EVERY_S)
    raise Broken(f"not ready within {timeout_s:g} s:\n{_tail(log)}")


def written_port(
    process: subprocess.Popen[bytes], file: Path, log: Path, timeout_s: float = START_TIMEOUT_S
) -> int:
    """Wait for the file with a process's port, and return the port. Raises Broken."""
    give_up_at = time.monotonic() + timeout_s
    while not file.exists():
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise Broken(f"no port within {timeout_s:g} s:\n{_tail(log)}")
        time.sleep(POLL_EVERY_S)
    return int(file.read_text())


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """Send one small HTTP request; return the status and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def run_load(job: Job, on: Sequence[str]) -> Result:
    """Run the load generator once, with a command that begins with ``on``.

    Raises:
        Broken: the load generator failed.
    """
    done = subprocess.run(
        [*on, *python_module("benchmarks.forwarding.load")],
        cwd=REPOSITORY, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Broken(f"the load generator failed:\n{done.stderr}")
    return Result(**json.loads(done.stdout))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(line[:LOG_LINE_CHARACTERS] for line in lines)
