"""Restarts the engine in process when it dies; the backends on it stay the same objects."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import psutil

from admission.values import BackendLoad
from engine.errors import EngineKilled, EngineStartError
from gateway.backends.engine_totals import Totals
from gateway.backends.host import EngineFacts, EngineHost, MakeHost, gone_and_stopped, kill
from gateway.backends.port import (
    Absence,
    Backend,
    BackendState,
    Completion,
    DelegatingBackend,
    DeltaSink,
    Work,
)
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.features import Feature
from observability.events import EngineFigures
from resilience.failures import BackendFailure, FailureKind
from resilience.heartbeat import NO_PROMPTS
from resilience.oom import cause_of_death, fewer_blocks, kernel_oom_kills
from resilience.supervisor import (
    Decision,
    EngineGivenUp,
    EngineLost,
    EngineRestarted,
    EngineRestarting,
    Loss,
    Observation,
    Supervisor,
    SupervisorEvent,
    SupervisorState,
)

# Time between two checks of the engine's processes, seconds; the engine's end is noticed at once.
CHECK_INTERVAL_S = 0.25
# The kernel's kill of a worker may be noticed so many seconds later: the engine answers its requests first.
OOM_WINDOW_S = 10.0
# Time between two looks at the kernel's count of such kills, seconds: the file has some 200 lines.
OOM_COUNT_EVERY_S = 1.0
# Longest time, seconds, for the remaining processes of a dead engine to end before the next one starts.
RETIRE_TIMEOUT_S = 15.0

_STATES: Mapping[SupervisorState, BackendState] = {
    SupervisorState.STARTING: BackendState.STARTING,
    SupervisorState.RESTARTING: BackendState.STARTING,
    SupervisorState.GIVEN_UP: BackendState.DEAD,
    SupervisorState.STOPPED: BackendState.STOPPED,
}


@dataclass(slots=True)
class _EngineRun:
    """One engine, from its creation to its end."""

    host: EngineHost
    backends: dict[str, Backend] = field(default_factory=dict)
    processes: Sequence[psutil.Process] = ()
    steps: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's state, for health and metrics."""

    state: SupervisorState
    restarts_last_hour: int
    ready_in_s: float | None

    def shown(self) -> dict[str, object]:
        ready_in_s = self.ready_in_s
        return {
            "state": self.state.value,
            "restarts_last_hour": self.restarts_last_hour,
            "ready_in_seconds": None if ready_in_s is None else round(ready_in_s, 1),
        }


@dataclass(eq=False)
class SupervisedHost:
    """Starts the engine, and after a death the next one; :meth:`keep` is its loop.

    Lives on the event loop. The first start is not repeated when it fails: the configuration is to blame.

    Args:
        start_timeout_s: longest time that a restart may take to load.
        on_step: called after each step with the number of preemptions of all engines so far.
        starting: held while an engine loads, by the caller of :meth:`start` too: engines load one at a time.
        sleep: waits that many seconds.
    """

    make: MakeHost
    _: KW_ONLY
    supervisor: Supervisor
    start_timeout_s: float
    on_step: Callable[[int], None]
    emit: Callable[[SupervisorEvent], None]
    clock: Callable[[], float]
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    oom_kills: Callable[[], int] = kernel_oom_kills

    def __post_init__(self) -> None:
        # The kernel's count of OOM kills at each check within OOM_WINDOW_S, and at the last one before.
        self._oom_counts = deque([(float("-inf"), self.oom_kills())])
        # Blocks of the first engine's KV pool, and of the next engine's if that must be smaller.
        self._first_blocks = 0
        self._kv_blocks: int | None = None
        self._totals = Totals()
        # The limits of the engine that is loaded, or was last.
        self.facts: EngineFacts | None = None
        self._decision: Decision | None = None
        self._lost_at = 0.0
        self._detail = ""
        self._news = asyncio.Event()
        self._run = self._new_run()

    @property
    def state(self) -> BackendState:
        """The engine's state; ``STARTING`` while it is to be restarted."""
        supervised = self.supervisor.state
        if supervised in (SupervisorState.READY, SupervisorState.SUSPECT):
            state = self._run.host.state
            # The host may show the engine's death before it reports it.
            return state if state is BackendState.READY else BackendState.STARTING
        return _STATES[supervised]

    @property
    def ready_in_s(self) -> float | None:
        return self.supervisor.ready_in_s(self.clock())

    def absence(self, name: str) -> Absence:
        first = self.supervisor.state is SupervisorState.STARTING
        doing = "loads its model" if first else "is being restarted"
        return Absence(f"the engine of {name} {doing}", loading=True)

    def status(self) -> EngineStatus:
        now, supervisor = self.clock(), self.supervisor
        restarts = supervisor.restarts_last_hour(now)
        return EngineStatus(supervisor.state, restarts, supervisor.ready_in_s(now))

    def figures(self) -> EngineFigures | None:
        """The engine's figures for the metrics; counters continue across restarts."""
        run = self._run
        return self._totals.on(None if run.over else run.host.figures())

    def backend(
        self, name: str, more: frozenset[Feature] = frozenset(), without: frozenset[Feature] = frozenset()
    ) -> "SupervisedBackend":
        """The engine as a backend of that name, whichever engine runs.

        ``more``: features that the gateway adds; ``without``: features that the model lacks.
        """
        return SupervisedBackend(name, self, more, without)

    def inner(self, name: str) -> Backend:
        if name not in self._run.backends:
            self._run.backends[name] = self._run.host.backend(name)
        return self._run.backends[name]

    def take_work(self, name: str, *, adapter: bool) -> None:
        """Note that the engine gets work: an idle one begins a step. Raises BackendFailure: it loads."""
        state = self.supervisor.state
        if state in (SupervisorState.STARTING, SupervisorState.RESTARTING):
            raise BackendFailure(
                FailureKind.BACKEND_UNAVAILABLE, self.absence(name).reason, retry_after_s=self.ready_in_s
            )
        if state is SupervisorState.GIVEN_UP:
            raise BackendFailure(
                FailureKind.ENGINE_DEAD, f"{name}: the engine has died too often and is not started again"
            )
        self.supervisor.heartbeat.got_work(self.clock(), adapter=adapter)

    async def wait_ready(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                self.notice_death()
                while self.state is BackendState.STARTING:
                    await self._news.wait()
                    self.notice_death()
        return self.state is BackendState.READY

    def notice_death(self) -> None:
        """Check whether the engine is dead; a failed request may detect that first."""
        if self._run.host.state is BackendState.DEAD:
            self._lose(self._run, Loss.EXITED, "a request found it dead")

    def request_restart(self, reason: str) -> None:
        """Restart a running engine whose output cannot be trusted. No effect while it restarts."""
        if self.supervisor.state in (SupervisorState.READY, SupervisorState.SUSPECT):
            run = self._run
            self._lose(run, Loss.DEVICE, reason)
            kill(run.processes)

    async def start(self) -> EngineFacts:
        """Start the first engine; one that is killed while it loads is replaced. Raises EngineStartError."""
        while True:
            self.supervisor.load_begun(self.clock())
            try:
                self.facts = await self._run.host.start()
                break
            except EngineKilled as error:
                self._detail = str(error)
                decision = self.supervisor.start_failed(self.clock(), killed=True)
                if decision is None or not await self._due(decision):
                    raise
                self._run = self._new_run()
        self._first_blocks = self.facts.total_blocks
        self.supervisor.started(self.clock())
        self._notify()
        return self.facts

    async def stop(self, timeout_s: float) -> None:
        self.supervisor.stop()
        self._notify()
        await self._run.host.stop(timeout_s)

    async def keep(self) -> None:
        """Watch the engine and start it again when it is lost; until cancelled, stopped or given up."""
        decision = await self._watch()
        while decision is not None and (restart := await self._due(decision)):
            decision = await self._start_again(restart) or await self._watch()

    async def _due(self, decision: Decision) -> EngineRestarting | None:
        """End what is left of the engine, and wait; ``None``: no other one is to be started."""
        await self._retire()
        self.emit(replace(decision, exit_code=self._run.host.exit_code, detail=self._detail))
        if isinstance(decision, EngineGivenUp):
            return None
        await self.sleep(decision.wait_s)
        return decision if self.supervisor.state is SupervisorState.RESTARTING else None

    async def _watch(self) -> Decision | None:
        """Wait until the engine is lost; returns what to do then, ``None`` when it was stopped."""
        run = self._run
        run.processes = await asyncio.to_thread(run.host.find_processes)
        while self._decision is None and self.supervisor.state is not SupervisorState.STOPPED:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._news.wait()
            self._check_processes(run)
        decision, self._decision = self._decision, None
        return decision

    def _check_processes(self, run: _EngineRun) -> None:
        if self.supervisor.state not in (SupervisorState.READY, SupervisorState.SUSPECT):
            return
        gone, stopped = gone_and_stopped(run.processes)
        seen = Observation(
            # It may have reported its death before its start was complete.
            exited=gone or run.host.state is BackendState.DEAD,
            stopped=stopped,
            unfinished=run.host.unfinished,
            steps=run.steps,
            pending=run.host.pending,
            occupied=run.host.occupied,
        )
        loss = self.supervisor.observe(self.clock(), seen)
        if loss is None:
            self._count_oom_kills()
        else:
            # Recorded before the kill, so that requests failing by it find the engine lost.
            self._lose(run, loss, f"pids {', '.join(str(process.pid) for process in run.processes)}")
            kill(run.processes)

    def _lose(self, run: _EngineRun, reason: Loss, detail: str) -> None:
        if run is not self._run:
            return  # a late report of an engine that was already replaced
        if reason is Loss.EXITED:
            reason = self._cause(run.host.last_error)
        decision = self.supervisor.lost(self.clock(), reason)
        if decision is not None:
            self._decision, self._lost_at, self._detail = decision, self.clock(), detail
            if reason is Loss.OUT_OF_MEMORY:
                self._shrink_pool()
            self.emit(EngineLost(reason, detail))
            self._notify()

    def _count_oom_kills(self) -> None:
        now, counts = self.clock(), self._oom_counts
        if now - counts[-1][0] < OOM_COUNT_EVERY_S:
            return
        counts.append((now, self.oom_kills()))
        while len(counts) > 1 and counts[1][0] <= now - OOM_WINDOW_S:
            counts.popleft()

    def _cause(self, error: str) -> Loss:
        return cause_of_death(error, oom_kills=self.oom_kills() - self._oom_counts[0][1])

    def _shrink_pool(self) -> None:
        facts = self.facts
        if facts is not None:
            longest = -(-facts.max_model_len // facts.block_size) + 1
            blocks = self._kv_blocks or facts.total_blocks
            self._kv_blocks = fewer_blocks(blocks, at_first=self._first_blocks, least=longest)

    async def _retire(self) -> None:
        """Stop what is left of a lost engine, and add its counters to the totals."""
        run = self._run
        if not run.over:
            self._totals.add(run.host.figures())
            run.over = True
        try:
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                await run.host.stop(0.0)
        except TimeoutError:
            self._detail += f"; what was left has not ended within {RETIRE_TIMEOUT_S:g} s"

    async def _start_again(self, restart: EngineRestarting) -> Decision | None:
        """Start the next engine; returns ``None`` when it takes work, else what to do next."""
        async with self.starting:
            started_at = self.clock()
            run = self._run = self._new_run()
            self.supervisor.load_begun(started_at)
            self._oom_counts = deque([(started_at, self.oom_kills())])
            error = await self._load(run)
        now = self.clock()
        if error is not None:
            self._detail = str(error) or f"not loaded within {self.start_timeout_s:g} s"
            if self._cause(f"{type(error).__name__}: {self._detail}") is Loss.OUT_OF_MEMORY:
                self._shrink_pool()
            decision = self.supervisor.start_failed(now)
            self._notify()
            return decision
        self.supervisor.started(now)
        blocks = self.facts.total_blocks if self.facts is not None else 0
        self.emit(
            EngineRestarted(restart.attempt, now - started_at, now - self._lost_at, total_blocks=blocks)
        )
        self._notify()
        self.on_step(self._totals.preemptions)  # wakes callers that wait for a step
        return None

    async def _load(self, run: _EngineRun) -> Exception | None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_load(run), name="engine-load-watch")
            try:
                async with asyncio.timeout(self.start_timeout_s):
                    self.facts = await run.host.start()
            except (EngineStartError, OSError) as error:  # a machine at its limits cannot make a process
                return error
            finally:
                watching.cancel()
        return None

    async def _watch_load(self, run: _EngineRun) -> None:
        """Kill an engine that is stopped while it loads, so that its start fails."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            processes = await asyncio.to_thread(run.host.find_processes)
            _, stopped = gone_and_stopped(processes)
            if self.supervisor.observe(self.clock(), Observation(stopped=stopped)) is not None:
                kill(processes)

    def _new_run(self) -> _EngineRun:
        def on_step(preemptions: int) -> None:
            run.steps += 1
            host = run.host
            if run is self._run:
                heartbeat = self.supervisor.heartbeat
                heartbeat.stepped(
                    self.clock(),
                    unfinished=host.unfinished > 0,
                    computed_tokens=host.computed_tokens,
                    pending=host.pending if heartbeat.has_adapters else NO_PROMPTS,
                )
            self.on_step(self._totals.preemptions + preemptions)

        run = _EngineRun(
            self.make(
                on_step=on_step,
                on_death=lambda error: self._lose(run, Loss.EXITED, " ".join(str(error).split())),
                kv_blocks=self._kv_blocks,
            )
        )
        return run

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class SupervisedBackend(DelegatingBackend):
    """Delegates to the running engine's backend; also a :class:`gateway.backends.port.Restarting`."""

    def __init__(
        self, name: str, host: SupervisedHost, more: frozenset[Feature], without: frozenset[Feature]
    ) -> None:
        self._name = name
        self._host = host
        self._more = more
        self._without = without

    @property
    def delegate(self) -> Backend:
        return self._host.inner(self._name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def features(self) -> frozenset[Feature]:
        return (self.delegate.features | self._more) - self._without

    @property
    def state(self) -> BackendState:
        return self._host.state

    @property
    def load(self) -> BackendLoad | None:
        """The engine's load as last reported; ``None`` while it takes no work."""
        return self.delegate.load if self._host.state is BackendState.READY else None

    @property
    def ready_in_s(self) -> float | None:
        return self._host.ready_in_s

    @property
    def absence(self) -> Absence:
        return self._host.absence(self._name)

    async def wait_ready(self, timeout_s: float) -> bool:
        return await self._host.wait_ready(timeout_s)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        with self._working(adapter=work.adapter is not None):
            return await self.delegate.generate(work, out)

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        """Vectors of the engine that runs now; its death fails the call."""
        with self._working():
            return await super().embed(part)

    @contextlib.contextmanager
    def _working(self, *, adapter: bool = False) -> Iterator[None]:
        self._host.take_work(self._name, adapter=adapter)
        try:
            yield
        except BackendFailure as failure:
            if failure.kind is FailureKind.ENGINE_DEAD:
                self._host.notice_death()
            raise
