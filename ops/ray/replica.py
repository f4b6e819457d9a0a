"""An engine replica: one engine in a Serve process, which answers calls of the ingress replicas."""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path

import msgspec
import structlog

from admission.values import BackendLoad
from budgeting.counting import ChatTokenizer
from gateway.backends.host import MakeHost
from gateway.backends.port import BackendState, Work
from gateway.backends.supervised import SupervisedHost
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.weights.progress import LogProgress
from gateway.weights.source import prepare
from gateway.wiring.engine import engine_maker
from ops.ray.flow import Flow
from ops.ray.port import ClusterPlace
from ops.ray.wire import Failed, ReplicaPiece, ReplicaSignals, decode_work, encode
from resilience.classify import classify
from resilience.failures import FailureKind, HealthEffect
from resilience.supervisor import Supervisor, SupervisorEvent

NAME = "engine"  # the name of the only backend on the engine; gateways use their own names for it
# Most gateways whose queue lengths are stored; how long a reported length counts, in seconds (some rounds).
MAX_GATEWAYS = 1_000
QUEUE_STALE_S = 10.0
STOP_TIMEOUT_S = 15.0  # vLLM's core takes more than five seconds to exit by itself

MakeEngine = Callable[[Settings], MakeHost]


def configured_engine(settings: Settings) -> MakeHost:
    """The configured engine. Raises ConfigError when there is none."""
    tokenizer = ChatTokenizer(settings.engine.tokenizer_folder)
    make = engine_maker(settings, settings.engine, tokenizer.token_bytes)
    if make is None:
        raise ConfigError("engine.kind: none; allowed: embedded or vllm, for engine replicas to run")
    return make


class EngineReplica:
    """Serve's class for the engine deployment; Serve prescribes its methods' names.

    Serve sends calls once ``start`` has loaded the engine. A dead engine is restarted in place, up to
    ``engine.max_restarts_per_hour``; then the replica fails its health check and Serve replaces it.
    """

    def __init__(
        self,
        place: ClusterPlace,
        make_engine: MakeEngine,
        replica: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        os.chdir(place.folder)
        settings = load_settings(Path(place.config))
        section, self._weights = prepare(settings.engine, settings.weights)
        settings = settings.model_copy(update={"engine": section})
        self._settings = settings
        self._replica = replica
        self._clock = clock
        self._log = structlog.get_logger("ops.ray").bind(replica=replica)
        self._queues: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._host = SupervisedHost(
            make_engine(settings),
            supervisor=Supervisor(
                max_restarts_per_hour=section.max_restarts_per_hour,
                hang_s=section.hang_seconds,
                stopped_s=section.stopped_seconds,
            ),
            start_timeout_s=section.start_timeout_seconds,
            on_step=lambda preemptions: None,  # the figures hold them
            emit=self._log_event,
            clock=clock,
        )
        self._backend = self._host.backend(NAME)
        self._tasks: asyncio.TaskGroup | None = None
        self._life: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def start(self) -> None:
        """Load the engine. Raises EngineStartError, FetchError or TimeoutError; Serve then retries."""
        await self._weights.fetch(LogProgress(self._weights.source, self._clock))
        async with asyncio.timeout(self._settings.engine.start_timeout_seconds):
            facts = await self._host.start()
        self._log.info("engine ready", max_model_len=facts.max_model_len, total_blocks=facts.total_blocks)
        started = asyncio.Event()
        # Serve has a constructor and a destructor, but no block around a replica's life: this task takes its
        # place and holds the task group of all other tasks.
        self._life = asyncio.create_task(self._live(started), name="replica")  # noqa: TID251
        await started.wait()

    async def stop(self) -> None:
        self._end.set()
        await self._host.stop(STOP_TIMEOUT_S)
        if self._life is not None:
            await self._life

    async def _live(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            keeper = tasks.create_task(self._host.keep(), name="keeper")
            started.set()
            await self._end.wait()
            keeper.cancel()

    async def generate(self, route: bytes, work: bytes) -> AsyncIterator[bytes]:
        """Yield the answer's pieces; only the router uses ``route``. Closing early ends the sequences."""
        yield encode(ReplicaPiece(replica=self._replica))
        tasks = self._tasks
        try:
            asked = decode_work(work)
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = "the gateway's work is not readable: replicas of two versions?"
            yield encode(ReplicaPiece(failed=Failed(FailureKind.INVALID_INPUT, text)))
            return
        if tasks is None or self._backend.state is not BackendState.READY:
            failed = Failed(FailureKind.BACKEND_UNAVAILABLE, "the replica's engine is not ready")
            yield encode(ReplicaPiece(failed=failed))
            return
        flow = Flow(watched=asked.stream)
        answering = tasks.create_task(self._answer(asked, flow), name=asked.generation_id)
        try:
            while not flow.ended:
                yield encode(await flow.take())
        finally:
            answering.cancel()

    async def _answer(self, work: Work, flow: Flow) -> None:
        try:
            flow.end(await self._backend.generate(work, flow.push))
        except Exception as error:
            failure = classify(error)
            if failure.kind is FailureKind.INTERNAL:
                self._log.error("internal error", generation_id=work.generation_id, exc_info=error)
            restart = failure.policy.health is HealthEffect.RESTART_ENGINE
            if restart and failure.kind is not FailureKind.ENGINE_DEAD:
                self._host.request_restart(failure.kind.value)
            flow.end(Failed.of(failure))

    async def signals(self, reporter_name: str, queued: int) -> bytes:
        """Record a gateway's queue length; returns the engine's figures."""
        self._queues[reporter_name] = (self._clock(), queued)
        self._queues.move_to_end(reporter_name)
        while len(self._queues) > MAX_GATEWAYS:
            self._queues.popitem(last=False)
        return encode(self._signals())

    def _signals(self) -> ReplicaSignals:
        ready, load, facts = self._backend.state is BackendState.READY, self._backend.load, self._host.facts
        longest = facts.max_model_len if facts is not None else 0
        return ReplicaSignals(self._replica, ready, load or BackendLoad(), longest, self._backend.features)

    def record_routing_stats(self) -> dict[str, float | bool]:
        """Figures for the router; Serve sends them to every ingress replica."""
        now = self._signals()
        requests = now.load.running + now.load.waiting
        return {"ready": now.ready, "requests": requests, "kv_usage": now.load.kv_usage}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for the autoscaling policy: the engine's, and the sum of the gateways' queues."""
        load, fresh = self._signals().load, self._clock() - QUEUE_STALE_S
        queued = sum(count for at, count in self._queues.values() if at >= fresh)
        return {
            "running": float(load.running),
            "waiting": float(load.waiting),
            "kv_usage": load.kv_usage,
            "queued": float(queued),
        }

    def check_health(self) -> None:
        """Raise RuntimeError if the engine or its supervision has ended: Serve then replaces the replica."""
        if self._backend.state in (BackendState.DEAD, BackendState.STOPPED):
            raise RuntimeError(f"the engine is {self._backend.state.value}")
        if self._life is not None and self._life.done() and not self._end.is_set():
            raise RuntimeError("the replica's own loop has ended")

    def _log_event(self, event: SupervisorEvent) -> None:
        self._log.warning("engine", event_type=type(event).__name__, **asdict(event))
