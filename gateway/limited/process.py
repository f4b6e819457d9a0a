"""Runs work of unknown cost in processes that are killed if they exceed their limits.

A server process (``python -m gateway.limited.process``) has imported the modules that the work needs. It
forks a child for each job, with one end of a socket, and with limits on processor time, wall time and memory,
which the kernel enforces. If the caller closes the other end, the kernel ends the child too, so a job stops
when its caller leaves.
"""

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, NoReturn

from engine.own_modules import with_own_modules

Work = Callable[[bytes], bytes]

_SIZE: Final = struct.Struct("!I")
GRACE_S: Final = 30.0  # longest time in which a server starts, or forks a child, on a busy machine
_NICENESS: Final = 10  # lower priority than the gateway's own processes, which must keep answering
# How a child ended: the first byte of the answer that the caller reads.
_DONE, _TIME, _MEMORY, _SIZE_OVER, _WALL, _FAILED = b"d", b"t", b"m", b"s", b"w", b"f"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one job. ``wall_s`` is for a machine too busy to give the job ``cpu_s`` in time."""

    cpu_s: float = 0.5
    wall_s: float = 60.0
    memory_bytes: int = 128 << 20
    answer_bytes: int = 16 << 20

    def described(self, bound: str, *, answer: str = "text") -> str:
        """Return the limit ``bound`` with its unit, for messages; ``answer``: what an answer consists of."""
        if bound == "cpu_s":
            return f"{self.cpu_s:g} s of processor time"
        if bound == "memory_bytes":
            return f"{self.memory_bytes >> 20} MiB of memory"
        return f"{self.answer_bytes >> 20} MiB of {answer}"


class LimitedError(Exception):
    """The work returned no answer."""


class OverLimit(LimitedError):
    """The work exceeded ``bound``, the name of a field of :class:`Limits`."""

    def __init__(self, bound: str) -> None:
        self.bound = bound
        super().__init__(bound)


class NoProcess(LimitedError):
    """The process failed, or the machine was too busy; another try may succeed."""


class LimitedProcess:
    """Does one kind of work. Thread-safe; the server starts with the first job, and again if it died.

    ``work``: ``module:function``, which gets ``arguments`` and returns the function from a job to its answer.
    A server that has not answered a job ``grace_s`` after its wall time is killed: something has stopped it.
    """

    def __init__(self, work: str, *arguments: str, limits: Limits, grace_s: float = GRACE_S) -> None:
        self.limits = limits
        self._longest_s = limits.wall_s + grace_s
        self._work = (work, *arguments)
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def run(self, job: bytes) -> bytes:
        """Return the answer to a job; a cancellation kills the child. Raises OverLimit, NoProcess."""
        ours = self._submit()
        try:
            ours.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        except BaseException:
            ours.close()
            raise
        try:
            with self._failures():
                writer.write(_SIZE.pack(len(job)) + job)
                async with asyncio.timeout(self._longest_s):
                    return _read(await reader.read())
        finally:
            writer.transport.abort()

    def run_blocking(self, job: bytes) -> bytes:
        """Return the answer to a job; blocks. Raises OverLimit, NoProcess."""
        with self._submit() as ours, self._failures():
            ours.settimeout(self._longest_s)
            ours.sendall(_SIZE.pack(len(job)) + job)
            return _read(b"".join(iter(lambda: ours.recv(1 << 20), b"")))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self.close()
            raise NoProcess("the process for this work does not answer") from None
        except OSError as error:
            raise NoProcess(str(error)) from error

    def close(self) -> None:
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._server is not None:
                self._server.kill()
                self._server.wait()
            self._server = self._control = None

    def _submit(self) -> socket.socket:
        """Start a job; return the gateway's end of its socket, of which the server has the other end."""
        for _ in range(2):  # the server may have died since the last job
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    with self._lock:
                        socket.send_fds(self._running(), [b"j"], [theirs.fileno()])
                    return ours
                except OSError:
                    ours.close()
                    self.close()
        raise NoProcess("the process for this work does not start")

    def _running(self) -> socket.socket:
        if self._control is None or self._server is None or self._server.poll() is not None:
            self._control, theirs = socket.socketpair()
            # A server that takes no jobs fills it; the event loop must not wait for that.
            self._control.setblocking(False)
            with theirs:
                self._server = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "gateway.limited.process", str(theirs.fileno())),
                        *(json.dumps(astuple(self.limits)), *self._work),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=with_own_modules(os.environ),
                )
        return self._control


def _read(answer: bytes) -> bytes:
    state, rest = answer[:1], answer[1:]
    if state == _DONE and rest[: _SIZE.size] == _SIZE.pack(max(0, len(rest) - _SIZE.size)):
        return rest[_SIZE.size :]
    bound = {_TIME: "cpu_s", _MEMORY: "memory_bytes", _SIZE_OVER: "answer_bytes"}.get(state)
    if bound is not None:
        raise OverLimit(bound)
    raise NoProcess(
        "the machine was too busy to finish it in time"
        if state == _WALL
        else "the process for this work ended without an answer"
    )


class _Server:
    """Forks a child for each job, and reports how a killed child ended. Has one thread."""

    def __init__(self, control: socket.socket, work: Work, limits: Limits) -> None:
        self._control = control
        self._work = work
        self._limits = limits
        self._children: dict[int, socket.socket] = {}
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Serve jobs until the gateway closes its end."""
        control = self._control.fileno()
        arrived = select.poll()  # unlike ``select``, for any descriptor: ``control`` has its parent's number
        arrived.register(control, select.POLLIN)
        arrived.register(self._woken, select.POLLIN)
        while True:
            ready = {fd for fd, _ in arrived.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if control in ready:
                data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                if not data:
                    return
                self._fork(socket.socket(fileno=fds[0]))

    def _fork(self, job: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:
            job.close()  # no memory or too many processes: the caller reads an empty answer
            return
        if not pid:
            for other in self._children.values():
                other.close()  # the job's reader waits until all copies of this end are closed
            _child(job, self._work, self._limits)
        self._children[pid] = job

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._children.pop(pid) as job, contextlib.suppress(OSError):
                job.setblocking(False)
                if os.WIFSIGNALED(status):
                    job.send(_ENDED.get(os.WTERMSIG(status), _MEMORY))


# By signal; any other signal means a failed allocation, a stack overflow, or the kernel's OOM killer.
_ENDED: Final[dict[int, bytes]] = {signal.SIGPROF: _TIME, signal.SIGALRM: _WALL, signal.SIGIO: _FAILED}


def _child(job: socket.socket, work: Work, limits: Limits) -> NoReturn:
    """Do one job and exit. The default action of each signal here ends the process at once."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM, signal.SIGIO):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.nice(_NICENESS)
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # other systems than Linux have no /proc, and no memory limit here
            most = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + limits.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with job.makefile("rb") as sent:
            [length] = _SIZE.unpack(sent.read(_SIZE.size))
            asked = sent.read(length)
        fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(job, fcntl.F_SETFL, fcntl.fcntl(job, fcntl.F_GETFL) | os.O_ASYNC)
        if not select.select([job], [], [], 0)[0]:  # a readable socket: the caller has left
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            answer = _answered(work, asked, limits.answer_bytes)
            signal.signal(signal.SIGIO, signal.SIG_IGN)  # the caller's read of the answer would raise it
            job.sendall(answer)
            status = 0
    finally:
        os._exit(status)


def _answered(work: Work, asked: bytes, most: int) -> bytes:
    try:
        answer = work(asked)
    except MemoryError:
        return _MEMORY
    # With its length: a child may be killed while it sends the answer.
    return _DONE + _SIZE.pack(len(answer)) + answer if len(answer) <= most else _SIZE_OVER


def main(argv: list[str]) -> None:
    """Run the server with the arguments ``FD LIMITS MODULE:FUNCTION ARGUMENT…``."""
    # Ctrl-C, a closed terminal and a service manager's SIGTERM reach every process of the tree; this one
    # ends with its socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    module, _, function = argv[2].partition(":")
    work: Work = getattr(importlib.import_module(module), function)(*argv[3:])
    _Server(socket.socket(fileno=int(argv[0])), work, Limits(*json.loads(argv[1]))).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
