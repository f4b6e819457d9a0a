"""vLLM as the gateway's engine in process: its start, its end and its state."""

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import structlog

from engine.errors import EngineDead, EngineKilled, EngineStartError
from gateway.backends.embedded_vectors import EncodePart, ids_alone
from gateway.backends.host import EngineFacts
from gateway.backends.lora_slots import LoraSlots, MakeSlots
from gateway.backends.port import Backend, BackendState
from gateway.backends.vllm import arguments, preload, processes
from gateway.backends.vllm.adapters import VllmAdapters
from gateway.backends.vllm.backend import VllmBackend, VllmPoolingBackend, warm_up
from gateway.backends.vllm.child_logs import ChildLogs
from gateway.backends.vllm.compat import start
from gateway.backends.vllm.compat.engine import VllmEngine
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.parser_names import ParserNames, parser_names
from gateway.backends.vllm.start_errors import check_folder, explain
from gateway.config.engine import EngineSection
from gateway.contracts.values import Sampling
from observability.events import EngineFigures
from resilience.heartbeat import NO_PROMPTS, PromptTokens

# Time between two searches of a cancelled start for processes that it has made since, seconds.
GIVE_UP_EVERY_S = 0.1
# Time for vLLM's own shutdown, in addition to the timeout of its core.
SHUTDOWN_GRACE_S = 5.0
WARM_UP_TIMEOUT_S = 300.0
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def visible_devices(devices: str | None) -> Iterator[None]:
    """Let processes started in the block see these GPUs alone; ``None``: all that this process sees."""
    before = os.environ.get(DEVICES_VARIABLE)
    if devices is not None:
        os.environ[DEVICES_VARIABLE] = devices
    try:
        yield
    finally:
        if devices is not None:
            os.environ.pop(DEVICES_VARIABLE)
            if before is not None:
                os.environ[DEVICES_VARIABLE] = before


@dataclass(eq=False)
class VllmHost:
    """Starts and stops vLLM and makes backends on it.

    vLLM is imported and the model is loaded in a thread: the event loop still answers ``/ping``.

    Args:
        defaults: sampling of the checkpoint, used where the caller sets none.
        new_seed: seed of requests without one, when ``engine.seed`` is unset.
        encode: tokenizes the inputs of embeddings.
    """

    section: EngineSection
    _: KW_ONLY
    adapters_registered: bool
    defaults: Sampling
    token_bytes: Callable[[int], bytes]
    on_step: Callable[[int], None]
    on_death: Callable[[EngineDead], None]
    new_seed: Callable[[], int]
    make_slots: MakeSlots = LoraSlots
    encode: EncodePart = ids_alone
    kv_blocks: int | None = None

    def __post_init__(self) -> None:
        section = self.section
        if self.kv_blocks is not None:
            section = self.section = section.model_copy(update={"num_blocks": self.kv_blocks})
        self._max_loras = arguments.lora_places(section, adapters_registered=self.adapters_registered)
        self._pools = section.task == "embed"
        self._parsers = ParserNames() if self._pools else parser_names(section)
        self.board = SignalBoard(self.on_step)
        self._adapters = VllmAdapters(lambda: self._engine)
        places = (section.max_cpu_loras or self._max_loras) if self._max_loras else 0
        self._slots = self.make_slots(self._adapters, places)
        self._state = BackendState.STARTING
        self._engine: VllmEngine | None = None
        # The limits of the loaded engine; None until it has started.
        self.facts: EngineFacts | None = None
        self._logs: ChildLogs | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._loading: Future[VllmEngine] | None = None
        self._given_up = threading.Event()
        self._has_processes = False
        self._cores: list[BaseProcess] = []
        # The children of this process before the start and, once the engine runs, those of the engine.
        self._others: frozenset[psutil.Process] = frozenset()
        self._own: frozenset[psutil.Process] | None = None
        self._sentinels: list[int] = []
        self._segments: set[Path] = set()
        self._ending = asyncio.Lock()

    @property
    def state(self) -> BackendState:
        if self._state is BackendState.READY and self._engine is not None and self._engine.dead:
            return BackendState.DEAD
        return self._state

    @property
    def unfinished(self) -> int:
        return self._engine.unfinished if self._engine is not None else 0

    @property
    def pending(self) -> PromptTokens:
        return self._engine.pending if self._engine is not None else NO_PROMPTS

    @property
    def computed_tokens(self) -> int:
        return self.board.computed_tokens

    @property
    def occupied(self) -> bool:
        return self._engine is not None and self._engine.occupied

    @property
    def last_error(self) -> str:
        return "" if self._logs is None else "\n".join(self._logs.recent_errors())

    @property
    def exit_code(self) -> int | None:
        return next((code for core in self._cores if (code := core.exitcode) is not None), None)

    def find_processes(self) -> Sequence[psutil.Process]:
        return processes.below(self._is_own)

    def _is_own(self, child: psutil.Process) -> bool:
        """Whether a child is this engine's. While it loads every new child is: engines load one at a time."""
        return child not in self._others if self._own is None else child in self._own

    def figures(self) -> EngineFigures | None:
        if self.facts is None or self._engine is None:
            return None
        return self.board.figures(self.section.model_id, self._engine.shape)

    def backend(self, name: str) -> Backend:
        make: Callable[..., Backend] = partial(VllmPoolingBackend, encode=self.encode)
        if not self._pools:
            make = partial(
                VllmBackend,
                defaults=self.defaults,
                loaded=self._adapters,
                slots=self._slots,
                takes_tools=lambda: self._parsers.tool is not None,
                share_prefixes=self.section.share_prefix_across_tenants,
            )
        return make(
            name=name,
            model=self.section.model_id,
            engine=lambda: self._engine,
            state_of=lambda: self.state,
            board=self.board,
        )

    async def start(self) -> EngineFacts:
        """Import vLLM, load the model, warm up.

        Raises EngineStartError: it cannot be started, or was started before. No process is left then, as
        after a cancellation.
        """
        if self._logs is not None or self._state is not BackendState.STARTING:
            raise EngineStartError(f"an engine is started once; this one is {self._state.value}")
        started_at = time.monotonic()
        logs = self._logs = ChildLogs()
        try:
            self._others = await asyncio.to_thread(processes.children)
            check_folder(self.section)
            logs.listen()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
            self._loading = self._thread.submit(self._load, logs)
            engine = await asyncio.wrap_future(self._loading)
            self._engine = engine
            self._watch()
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                await engine.prepare()
                await warm_up(engine)
                await asyncio.to_thread(self._note_segments)
            if self.state is BackendState.DEAD:
                raise EngineKilled("vLLM's core process ended while it started")
        except BaseException as error:
            errors = logs.errors
            await self.stop(0.0)
            if not isinstance(error, Exception):
                raise
            raise explain(error, errors, self.section) from error
        logs.started()
        self.board.forget()
        load_s = round(time.monotonic() - started_at, 2)
        self.facts = replace(engine.shape, details={**engine.shape.details, "load_s": load_s})
        self._state = BackendState.READY
        return self.facts

    def _load(self, logs: ChildLogs) -> VllmEngine:
        """Import vLLM and load the model. Blocks, so it runs in the thread."""
        version = start.installed_version()
        # The workers of Ray run on other machines, which cannot read a file of this one.
        level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
        on_ray = self.section.distributed_executor_backend == "ray"
        start.prepare_environment(None if on_ray else logs.write_config(level))
        self._has_processes = True
        with preload.paused_collector():
            preload.load_torch_libraries()
            start.load(version, self._check_wanted)
        asked = arguments.engine_arguments(self.section, max_loras=self._max_loras, new_seed=self.new_seed)
        with visible_devices(self.section.visible_devices):
            engine = start.start(version, asked, self.section, self.board, self.token_bytes, self._parsers)
        self._parsers = engine.parser_names
        gc.freeze()
        if self._given_up.is_set():
            engine.shutdown(0.0)
            self._check_wanted()
        return engine

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise EngineStartError("the engine's start was given up")

    def _watch(self) -> None:
        """Watch the core's sentinel, so that its death is noticed also when nothing is in flight."""
        self._cores = processes.cores(self._is_own)
        # Duplicates: multiprocessing closes its own when the exit code is read.
        self._sentinels = [os.dup(core.sentinel) for core in self._cores]
        for sentinel in self._sentinels:
            asyncio.get_running_loop().add_reader(sentinel, self._died)

    def _note_segments(self) -> None:
        """Record the engine's processes and the shared memory to free if they are killed. Blocks."""
        self._own = processes.children() - self._others
        self._segments = processes.shared_memory(self.find_processes())

    def _unwatch(self) -> None:
        for sentinel in self._sentinels:
            asyncio.get_running_loop().remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels = []

    def _died(self) -> None:
        self._unwatch()
        if self._engine is not None:
            self._engine.give_up()
        if self._state not in (BackendState.STARTING, BackendState.READY):
            return
        before, self._state = self._state, BackendState.DEAD
        if before is BackendState.READY:
            self.on_death(EngineDead("vLLM's core process has ended"))

    async def stop(self, timeout_s: float) -> None:
        self._given_up.set()
        if self._state is not BackendState.DEAD:
            self._state = BackendState.STOPPED
        async with self._ending:
            self._unwatch()
            if self._thread is not None:
                await self._end(timeout_s)
                self._thread.shutdown(wait=False)
                self._thread = None
            if self._logs is not None:
                self._logs.close()
                self._logs = None
                # Without this, libraries report leaks at Python's exit.
                gc.unfreeze()

    async def _end(self, timeout_s: float) -> None:
        while self._loading is not None and not self._loading.done():
            # The thread cannot be interrupted, but the processes that it waits for can be killed.
            if self._has_processes:
                processes.kill(self.find_processes(), 0.0)
            await asyncio.to_thread(wait, [self._loading], GIVE_UP_EVERY_S)
        if not self._has_processes:
            return
        loop = asyncio.get_running_loop()
        left = self.find_processes()
        engine, self._engine = self._engine, None
        if engine is not None:
            if not timeout_s:
                engine.give_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s + SHUTDOWN_GRACE_S):
                    await loop.run_in_executor(self._thread, engine.shutdown, timeout_s)
            engine.give_up()
        still = await asyncio.to_thread(processes.kill, [*left, *self.find_processes()])
        await asyncio.to_thread(processes.release, self._segments)
        if still:
            structlog.get_logger("vllm").error("processes are left", pids=[process.pid for process in still])
