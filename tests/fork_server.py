"""Processes that begin with everything imported: forked off a process that has imported it and has no threads.

A gateway takes 2 seconds of a core to import, an engine 2, and each of vLLM's processes 10; the tests start hundreds.
What is forked is a process of its own: its own pid, files, environment and signals, and a child of the one that asked
for it. ``ForkedPopen`` is ``subprocess.Popen``; ``install`` serves what product code and benchmarks start: the engine,
vLLM's processes, `sluice serve` and what a benchmark starts often; ``install_for_tests`` what pytest-xdist starts.

Where there is no ``prctl`` or setproctitle (vLLM brings it), where vLLM's build for GPUs is installed, and with
``SLUICE_TEST_EXEC=1``, processes start as usual.
Tests of vLLM's start itself use ``ImportingPopen``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import logging
import logging.config
import multiprocessing.spawn
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from budgeting.tokenizer_files import TokenizerFiles

ROOT = Path(__file__).parents[1]
# With it, a process starts others as usual.
_EXEC = "SLUICE_TEST_EXEC"


def _is_for_gpus() -> bool:
    """Whether vLLM's build for CUDA is installed: its processes cannot be forked off one that has loaded CUDA."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm"))
    return False


AVAILABLE = (
    sys.platform == "linux"
    and importlib.util.find_spec("setproctitle") is not None
    and _EXEC not in os.environ
    and not _is_for_gpus()
)
# What is imported ahead. vLLM has a server of its own, without Numba: it looks into all modules that there are.
GATEWAY = (
    "gateway.server",
    "ops.cli.serve",
    "ops.cli.main",
    "engine.process",
    "aiosqlite",
    "alembic.command",
    "uvicorn.lifespan.off",
)
ENGINE = ("engine.build", "engine.kernels")
# What the tests themselves take longest to import.
TESTS = (
    "anthropic",
    "boto3",
    "moto.server",
    "openai",
    "transformers.models.auto.modeling_auto",
    "peft",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
)
VLLM = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.entrypoints.openai.api_server",
    # Each worker asks them whether a model is quantized while it loads, each core makes a grammar's mask of tokens.
    "vllm.model_executor.layers.quantization.online.base",
    "llguidance.torch",
)
# What is read while they are imported.
_VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # what little vLLM compiles on a CPU takes longer to compile than to run
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
# Above the numbers that a child is given.
_FIRST_FREE_FD = 300
_MAX_REQUEST_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE, _HUGE_BYTES = 25, 2 << 20
# Of the demo model's engine: as it starts without a setting, and in the conformance suite.
_BLOCK_SIZES = (16, 32)
_SPAWN = re.compile(r"from multiprocessing\.spawn import spawn_main; spawn_main\((.*)\)")


class ForkServer:
    """Asks a server for processes; they become children of this process, which must be an ancestor of the server."""

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None, *, vllm: bool
    ) -> None:
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()
        self.vllm = vllm

    @classmethod
    def start(
        cls, *, vllm: bool = False, tests: str | None = None, fork: ForkServer | None = None
    ) -> ForkServer:
        """Start a server, also for processes that run ``tests`` (``ALL`` or ``FAST``); it ends with this process.

        With ``fork`` it is forked off that server, and imports only what is not there: half of what vLLM imports.
        """
        from engine.client import _child_environment

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        searched = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = _child_environment() | {"PYTHONPATH": searched} | (_VLLM_ENVIRONMENT if vllm else {})
        words = ["-m", *_SERVER, str(theirs.fileno()), *(["vllm"] if vllm else [tests] if tests else [])]
        with theirs:
            if fork is not None:
                with open(os.devnull) as nothing:
                    files = {0: nothing.fileno(), 1: 1, 2: 2, theirs.fileno(): theirs.fileno()}
                    fork.fork(words, env=env, cwd=ROOT, files=files)
                return cls(ours, vllm=vllm)
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return cls(ours, process, vllm=vllm)

    def fork(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        files: Mapping[int, int],
        session: bool = False,
        first: Callable[[], object] | None = None,
    ) -> int:
        """A new process of Python with these words; returns its pid.

        ``files`` are numbers in the new process with the open files of this one that it gets there. It calls
        ``first``, a function of a module, before it does anything else.
        """
        request = {
            "words": list(words),
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "files": list(files),
            "session": session,
            "first": first and [first.__module__, first.__qualname__],
        }
        with self._lock, _adopting():
            socket.send_fds(self._connection, [json.dumps(request).encode()], list(files.values()))
            answer = self._connection.recv(64)
        if not answer:
            raise RuntimeError("the server of forked processes has ended")
        return int(answer)


_servers: list[ForkServer] = []
_starting = threading.Lock()


def server(*, vllm: bool = False) -> ForkServer:
    """The server of this process, started when it is first needed."""
    with _starting:
        for one in _servers:
            if one.vllm is vllm:
                return one
        _servers.append(ForkServer.start(vllm=vllm, fork=next(iter(_servers), None) if vllm else None))
        return _servers[-1]


@contextlib.contextmanager
def _adopting() -> Any:
    """Meanwhile this process becomes the parent of what its children leave behind."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
# The modules that are forked when product code, a benchmark or vLLM starts them, and what follows them.
_FORKED = (
    ["ops.cli", "serve"],
    ["benchmarks.gpu_parts"],
    ["pytest"],  # a part of the check on a GPU
    ["benchmarks.forwarding.load"],
    ["benchmarks.forwarding.proxy"],
    ["benchmarks.forwarding.worker"],
    ["benchmarks.request_cost.counted"],
    ["vllm.model_executor.models.registry"],  # asks what a model can do where vLLM's cache does not tell
)
# Which files of the tests a server has imported.
ALL, FAST = "all-tests", "fast-tests"
# A server that is forked off another one.
_SERVER = ["tests.fork_server"]
# The engine's process, and those of tests in which it fails.
_ENGINES = (["engine.process"], ["tests.engine.failing_child"], ["tests.engine.hanging_child"])
# The check on a GPU asks PyTorch, which it does not import itself.
_ASKS_FOR_THE_DEVICE = "import torch; found = torch.cuda"
# A process of pytest-xdist.
_XDIST = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
# Options of subprocess.Popen that only a new program gets.
_NEW_PROGRAM = ("gid", "gids", "uid", "startupinfo", "shell")


def _fork_child(popen: subprocess.Popen[Any], asked: Mapping[str, Any], *, vllm: bool | None = None) -> None:
    """What ``subprocess.Popen._execute_child`` does with these arguments, by the server.

    ``vllm``: whether the server has imported it; without it, the process's arguments tell.
    """
    pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    files = {number: number if file == -1 else file for number, file in enumerate(pipes)}
    environ = os.environ if asked["env"] is None else asked["env"]
    if vllm is None:
        vllm = environ.get("SLUICE_ENGINE__KIND") == "vllm" or "vllm" in asked["args"][2]
    popen.pid = server(vllm=vllm).fork(
        asked["args"][1:],
        env=asked["env"],
        cwd=asked["cwd"],
        files=files | {number: number for number in asked["pass_fds"]},
        session=asked["start_new_session"],
        first=asked["preexec_fn"],
    )
    popen._child_created = True  # type: ignore[attr-defined]
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


def _forked_or(popen: subprocess.Popen[Any], *args: Any) -> None:
    """``subprocess.Popen._execute_child``; what is in ``_FORKED`` is forked."""
    asked = inspect.signature(_execute_child).bind(popen, *args).arguments
    if not _is_forked(asked["args"]) or any(asked[name] for name in _NEW_PROGRAM):
        _execute_child(popen, *args)
    else:
        _fork_child(popen, asked)


def _is_forked(words: Any) -> bool:
    if isinstance(words, str | bytes | os.PathLike):
        return False
    words = [os.fspath(word) for word in words]
    if words[1:] == _XDIST or (words[1:2] == ["-c"] and words[2].startswith(_ASKS_FOR_THE_DEVICE)):
        return True
    return words[:2] == [sys.executable, "-m"] and any(words[2 : 2 + len(one)] == one for one in _FORKED)


class ForkedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen`` of ``[sys.executable, "-m", …]`` or ``"-c"``, forked off the server where that is possible."""

    def _execute_child(self, *args: Any) -> None:
        if AVAILABLE:
            _fork_child(self, inspect.signature(_execute_child).bind(self, *args).arguments)
        else:
            _execute_child(self, *args)


class ImportingPopen(subprocess.Popen[Any]):
    """``ForkedPopen`` of a gateway that imports vLLM itself, and starts vLLM's processes as an operator's does."""

    def _execute_child(self, *args: Any) -> None:
        asked = inspect.signature(_execute_child).bind(self, *args).arguments
        if AVAILABLE:
            _fork_child(self, asked | {"env": asked["env"] | {_EXEC: "1"}}, vllm=False)
        else:
            _execute_child(self, *args)


def run(
    words: Sequence[str], *, stdin: Any = None, timeout: float = 120, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` by ``ForkedPopen``, with the output as text; ``input`` is what it reads."""
    given = options.pop("input", None)
    source = (
        subprocess.DEVNULL if given is None and stdin is None else subprocess.PIPE if stdin is None else stdin
    )
    pipes = {"stdin": source, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ForkedPopen(words, **pipes, **options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Child:
    """A forked process as ``asyncio.create_subprocess_exec`` would return it, without pipes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        return int(await asyncio.wait({self._ended}) and self._ended.result())

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


_create_subprocess_exec = asyncio.create_subprocess_exec
_spawnv_passfds = multiprocessing.util.spawnv_passfds


async def _engine_or(program: str, *words: str, **options: Any) -> Any:
    """``asyncio.create_subprocess_exec``; the engine's process is forked, and a gateway without pipes.

    uvloop's does not use ``subprocess.Popen``.
    """
    streams = [options.get(name) for name in ("stdin", "stdout", "stderr")]
    is_engine = program == sys.executable and words[0] == "-m" and [*words[1:2]] in _ENGINES
    if subprocess.PIPE in streams or not (is_engine or _is_forked((program, *words))):
        return await _create_subprocess_exec(program, *words, **options)
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        files = {
            number: number if file is None else nothing if file == subprocess.DEVNULL else file
            for number, file in enumerate(streams)
        }
        files |= {number: number for number in options.get("pass_fds", ())}
        return _Child(
            server().fork(
                words,
                env=options["env"],
                files=files,
                session=options.get("start_new_session", False),
                first=options.get("preexec_fn"),
            )
        )
    finally:
        os.close(nothing)


def _vllm_or(path: Any, words: Sequence[Any], passed: Sequence[int]) -> int:
    """``multiprocessing.util.spawnv_passfds``; a process of vLLM is forked."""
    command = [os.fsdecode(word) for word in words]
    if "vllm" not in sys.modules or not any(map(_SPAWN.fullmatch, command)):
        return _spawnv_passfds(path, words, passed)
    files = {number: number for number in (0, 1, 2, *passed)}
    return server(vllm=True).fork(command[1:], files=files)


def install() -> None:
    """Fork the engine's process, vLLM's and gateways from now on, whatever starts them in this process."""
    if AVAILABLE:
        subprocess.Popen._execute_child = _forked_or  # type: ignore[attr-defined]
        asyncio.create_subprocess_exec = _engine_or
        multiprocessing.util.spawnv_passfds = _vllm_or


def install_for_tests(*, fast: bool) -> None:
    """Fork the processes of pytest-xdist: they have imported the tests, and what they fork has so too."""
    if (
        AVAILABLE and not _servers
    ):  # or this process was forked off a server that has imported them (tests/whole.py)
        _servers.append(ForkServer.start(tests=FAST if fast else ALL))
        install()


def serve(connection: socket.socket, *, vllm: bool) -> None:
    """Fork until the other end is closed. A process between makes the new one an orphan, which is then adopted."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 64)
        if not data:
            os._exit(0)
        pid_read, pid_write = os.pipe()
        held, release = os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(pid_write, str(pid).encode())
                os._exit(0)
            os.close(release)
            os.read(held, 1)  # until its parent is the one that asked
            for file in (pid_read, pid_write, held):
                os.close(file)
            connection.close()
            _become(json.loads(data), files, vllm=vllm)
        os.close(pid_write)
        os.close(held)
        pid = int(os.read(pid_read, 64))
        os.waitpid(between, 0)
        for file in (pid_read, release, *files):
            os.close(file)
        connection.send(str(pid).encode())


def _become(request: dict[str, Any], files: Sequence[int], *, vllm: bool) -> None:
    """Be the process that was asked for; does not return."""
    import setproctitle

    words: list[str] = request["words"]
    spawned = _SPAWN.fullmatch(words[-2]) if len(words) > 1 else None
    if _EXEC not in request["env"] and (spawned or words[1:2] not in (*_ENGINES, _SERVER)):
        _offspring(files, vllm=vllm)
        install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if request["session"]:
        os.setsid()
    if request["first"]:
        module, name = request["first"]
        getattr(importlib.import_module(module), name)()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], high, strict=True):
        os.dup2(file, number)
        os.close(file)
    setproctitle.setproctitle(" ".join([sys.executable, *words]))
    if vllm:
        from vllm.logger import _configure_vllm_root_logger

        _configure_vllm_root_logger()
    if (words == _XDIST or words[1] == "pytest") and (torch := sys.modules.get("torch")):
        # A fork makes PyTorch's pool anew at its first use; two threads that use it first find none.
        torch.set_num_threads(torch.get_num_threads())
    status: Any = 1
    try:
        if spawned:
            sys.argv = ["-c", words[-1]]
            arguments = dict(pair.split("=") for pair in spawned[1].split(", "))
            multiprocessing.spawn.spawn_main(**{name: int(value) for name, value in arguments.items()})
        elif words == _XDIST:
            _run_text(words[-1], [])
        elif words[0] == "-c":
            _run_text(words[1], words[2:])
        else:
            _run_module(words[1], words[2:])
        status = 0
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _run_text(text: str, words: Sequence[str]) -> None:
    """``python -c text words``."""
    sys.argv, sys.path[0] = ["-c", *words], ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(text, vars(sys.modules["__main__"]))


def _run_module(name: str, words: Sequence[str]) -> None:
    """``python -m name words``."""
    found = importlib.util.find_spec(name)
    assert found is not None
    sys.argv = [found.origin or name, *words]
    sys.path[0] = os.getcwd()
    if name == "engine.process":
        sys.exit(sys.modules[name].main(list(words)))
    if "ops.cli" in (name, *words[1:2]):  # itself, or with its calls counted
        # It shares the pages of the one that it was forked off. To move them copies all, for up to 2 s of a core.
        sys.modules["gateway.server"].use_huge_pages = lambda: None  # type: ignore[attr-defined]
    if name == "ops.cli":
        sys.exit(sys.modules["ops.cli.main"].main())
    if [name] == _SERVER:
        add_vllm(int(words[0]))
    sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _offspring(files: Sequence[int], *, vllm: bool) -> None:
    """A server for the processes of this one: as fresh as the one that this process was forked off.

    It holds none of this one's ``files``: others wait for their end.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for file in files:
            os.close(file)
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
        theirs.close()
        serve(socket.socket(fileno=high), vllm=vllm)
    theirs.close()
    _servers[:] = [ForkServer(ours, vllm=vllm)]


def _start_and_end_quickly() -> None:
    """Of what each of vLLM's processes does, some goes over all modules, loggers or objects.

    What takes the place of Triton's kernels is set in here, once. Loggers that are there have nothing to be reset. A
    process that ends collects no garbage of before its fork.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    # Only modules of vLLM hold its kernels; objects of others (Numba's, Werkzeug's) do not bear to be looked into.
    dispatcher.sys = _VllmModules()  # type: ignore[attr-defined]
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
    logging.config._handle_existing_loggers = lambda *loggers: None  # type: ignore[attr-defined]
    gc.unfreeze = lambda: None


class _VllmModules:
    """As much of ``sys`` as vLLM's registry of kernels needs."""

    @property
    def modules(self) -> dict[str, types.ModuleType]:
        return {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "vllm"}


def _wait_without_spinning() -> None:
    """vLLM's processes spin for a second after each message to each other; here the cores have other work.

    A notice that follows another one at once is lost, so they look again: soon, or rarely when they are idle.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def wait_for_notice(self: SpinCondition, timeout_ms: int | None = None) -> None:
        idle = time.monotonic() > self.last_read + self.busy_loop_s
        again_ms = 50 if idle else 1
        busy_loop_s, self.busy_loop_s = self.busy_loop_s, 0
        try:
            wait(self, again_ms if timeout_ms is None else min(timeout_ms, again_ms))
        finally:
            self.busy_loop_s = busy_loop_s

    SpinCondition.wait = wait_for_notice


def _share_a_loop() -> None:
    """Each of a worker's groups for collective calls, 14 of them, has a thread that wakes 100 times a second. Here all
    have one.
    """
    from torch.distributed import distributed_c10d as groups

    gloo = groups.ProcessGroupGloo
    device = functools.cache(gloo.create_default_device)

    class WithOneLoop(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device()], timeout
            super().__init__(store, rank, size, options)

    groups.ProcessGroupGloo = WithOneLoop  # type: ignore[misc]


def _prepare_commands() -> None:
    """The tree of all commands is made once, not in each process that runs one of them."""
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(sys.modules["ops.cli.main"].app)


def _prepare_tokenizer() -> None:
    """To read the demo model's tokenizer and its template takes a third of the start of each gateway that serves it."""
    import budgeting.counting as counting
    import budgeting.vocabulary
    from budgeting.tokenizer_files import read_tokenizer_files

    budgeting.vocabulary.ByteBpe = functools.cache(budgeting.vocabulary.ByteBpe)  # type: ignore[assignment, misc]
    demo = read_tokenizer_files(ROOT / "models" / "demo")
    make_vocabulary, make_template = counting.Vocabulary, counting.ChatTemplate
    vocabulary = make_vocabulary(demo)
    template = make_template(demo.template, demo.specials, now=datetime.now)
    assert not template.is_bounded

    def vocabulary_of(files: TokenizerFiles, *, elsewhere: Any = None) -> Any:
        if files.tokenizer_json != demo.tokenizer_json:
            return make_vocabulary(files, elsewhere=elsewhere)
        made = copy.copy(vocabulary)
        made._elsewhere = elsewhere
        return made

    def template_of(source: str, specials: Mapping[str, str], **keys: Any) -> Any:
        if (source, specials) != (demo.template, demo.specials):
            return make_template(source, specials, **keys)
        return template

    counting.Vocabulary = vocabulary_of  # type: ignore[assignment, misc]
    counting.ChatTemplate = template_of  # type: ignore[assignment, misc]


def _collect_tests(*, fast: bool) -> None:
    """The tests, as pytest imports and collects them: the processes of pytest-xdist need not do it again."""
    import hypothesis
    import pytest
    from hypothesis.errors import HypothesisSideeffectWarning

    collection = _Collection()
    with contextlib.redirect_stdout(io.StringIO()):
        words = ["--collect-only", "-q", "--capture=no", *(["--fast"] if fast else [])]
        if pytest.main(words, plugins=[collection]) == pytest.ExitCode.OK:
            collection.hand_on()  # otherwise each process collects for itself, and tells what is wrong
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisSideeffectWarning)  # that it reads files before the tests
        hypothesis.strategies.text().validate()  # reads what Unicode says of each character
        with contextlib.suppress(ImportError):  # a private name: without it, each process reads for itself
            from hypothesis.internal.conjecture.providers import _get_local_constants

            _get_local_constants()  # reads the constants of the code under test


class _Collection:
    """All tests, collected once: pytest's session becomes that of each process of pytest-xdist."""

    def __init__(self) -> None:
        self.skipped: list[pytest.CollectReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session = session
        self.fixtures = session._fixturemanager

    def hand_on(self) -> None:
        """To the sessions of processes of pytest-xdist that are asked for all tests."""
        import pytest

        make = pytest.Session.from_config

        def session_of(config: pytest.Config) -> pytest.Session:
            is_whole = config.args == config.getini("testpaths")
            is_whole = is_whole and not (config.option.ignore or config.option.ignore_glob)
            return self._session(config) if is_whole and hasattr(config, "workerinput") else make(config)

        pytest.Session.from_config = session_of  # type: ignore[method-assign, assignment]

    def _session(self, config: pytest.Config) -> pytest.Session:
        session = self.session
        nodes = {node for item in session.items for node in item.iter_parents()}
        for owner in (*nodes, self.fixtures):
            owner.config = config
        session.shouldstop = session.shouldfail = False
        session.testsfailed = 0
        config.pluginmanager.register(session, name="session")
        session.perform_collect = self._collect  # type: ignore[method-assign, assignment]
        return session

    def _collect(self) -> None:
        session, config = self.session, self.session.config
        session._fixturemanager = self.fixtures
        for report in self.skipped:
            config.hook.pytest_collectreport(report=report)
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
        config.hook.pytest_collection_finish(session=session)
        session.testscollected = len(session.items)


def _compile_ahead() -> int:
    """Start a process that compiles the tests, which takes 5 s in a new clone, while this one imports libraries.

    It also looks for the constants of the code under test, for Hypothesis. Returns its pid.
    """
    if pid := os.fork():
        return pid
    status = 1
    with contextlib.suppress(Exception):  # then each file is compiled when it is imported
        from _pytest.assertion import rewrite
        from _pytest.config import _prepareconfig
        from hypothesis.errors import HypothesisSideeffectWarning
        from hypothesis.internal.constants_ast import constants_from_module, is_local_module_file

        warnings.simplefilter("ignore", HypothesisSideeffectWarning)
        config = _prepareconfig(["--capture=no"])
        state = config.stash[rewrite.assertstate_key]
        for file in sorted(ROOT.joinpath("tests").rglob("test_*.py")):
            compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(compiled.parent):
                stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, stat, compiled)
        for file in (file for folder in ROOT.glob("[a-z]*/") for file in folder.rglob("*.py")):
            if is_local_module_file(str(file)):
                module = types.ModuleType(file.stem)
                module.__file__ = str(file)
                constants_from_module(module)
        status = 0
    os._exit(status)


def _prepare_numba() -> None:
    """Numba imports most of itself, and registers it, when it first compiles or loads a function."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _prepare_loops() -> None:
    """The compiled loops of the demo model's engine, which each engine would load, or in a new clone compile."""
    import engine.kernels as kernels
    from engine.build import build_engine
    from engine.process import _warm_up
    from engine.values import EngineConfig

    compile_loops = kernels.compile_loops
    kept = functools.cache(functools.partial(compile_loops, parallel=False))

    def loops_of(*shape: int, parallel: bool) -> Any:
        # Parallel ones need threads, which no process has before it is forked.
        return compile_loops(*shape, parallel=True) if parallel else kept(*shape)

    kernels.compile_loops = loops_of
    for block_size in _BLOCK_SIZES:
        demo = str(ROOT / "models" / "demo")
        _warm_up(build_engine(EngineConfig(demo, num_threads=1, num_blocks=8, block_size=block_size)))


def _in_huge_pages() -> None:
    """Move this process's memory into pages of 2 MiB where the kernel can (Linux 6.1).

    To fork, the table of pages is copied: of half a gigabyte in small ones for 15 ms of a core, and as much for the
    copy's end. A process under test is made by three forks.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        if access.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in span.split("-"))
            start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def main(fd: int, *, what: Collection[str]) -> None:
    """Import, then serve."""
    import setproctitle

    setproctitle.getproctitle()  # looks for the room of the title, which is lost when the environment changes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()
    if FAST in what:  # neither an engine nor a server
        _collect_tests(fast=True)
        return _serve_all_of_it(fd, vllm=False)
    vllm = "vllm" in what
    compiling = _compile_ahead() if ALL in what and not sys.dont_write_bytecode else None
    for name in GATEWAY + (VLLM if vllm else ENGINE) + (TESTS if ALL in what else ()):
        importlib.import_module(name)
    _prepare_commands()
    _prepare_tokenizer()
    if vllm:
        _wait_without_spinning()
        _share_a_loop()
        _start_and_end_quickly()
    else:
        _prepare_numba()
    if ALL in what:
        if compiling is not None:
            os.waitpid(compiling, 0)
        _collect_tests(fast=False)
        _prepare_loops()
    _serve_all_of_it(fd, vllm=vllm)


def add_vllm(fd: int) -> None:
    """Import vLLM into a process that has imported the rest, then serve."""
    import huggingface_hub.constants
    import torch._dynamo.config

    # What is read while they are imported, and they may have been.
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    gc.disable()
    for name in VLLM:
        importlib.import_module(name)
    _wait_without_spinning()
    _share_a_loop()
    _start_and_end_quickly()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _serve_all_of_it(fd, vllm=True)


def _serve_all_of_it(fd: int, *, vllm: bool) -> None:
    # What libraries end with a process is this one's: a forked one would only copy its pages to end it.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Modules made with nanobind empty the caches of `typing` at Python's exit, which is not how these processes end.
    typing._cleanups.clear()  # type: ignore[attr-defined]
    gc.freeze()
    _in_huge_pages()
    gc.enable()
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
    os.close(fd)
    serve(socket.socket(fileno=high), vllm=vllm)


if __name__ == "__main__":
    sys.modules["tests.fork_server"] = sys.modules["__main__"]
    main(int(sys.argv[1]), what=sys.argv[2:])
