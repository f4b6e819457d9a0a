"""The three health checks: ``ping`` (alive), ``ready``, and ``deep`` (generating)."""

import asyncio
import wave
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from typing import Any, Final

from msgspec import structs

from budgeting.errors import NoTokenizer
from budgeting.values import Message, Role
from gateway.backends.port import (
    Backend,
    BackendState,
    Completion,
    Fleet,
    Work,
    generates,
    makes_vectors,
    scores_texts,
    transcribes,
)
from gateway.backends.supervised import EngineStatus
from gateway.backends.workers.inspection import WorkerInspections
from gateway.contracts.audio import TOKENS_PER_AUDIO_S, Recording, no_event
from gateway.contracts.embeddings import EmbeddingsRequest, PooledAnswer
from gateway.contracts.events import TAKEN
from gateway.contracts.features import Feature
from gateway.contracts.rerank import ScoreRequest
from gateway.contracts.values import Caller, CallerRole, Sampling, Usage
from gateway.errors import BackendUnavailable
from gateway.health.gpus import read_gpus
from gateway.health.rolling_stats import RollingStats
from gateway.prompts.text import ModelText
from gateway.requests.in_flight import InFlightRequests
from observability.events import EngineFigures
from resilience.failures import BackendFailure, FailureKind
from resilience.supervisor import SupervisorState

# Above 98 % KV cache use an allocation may fail at any time; above 50 % errors the circuit breaker is open.
MEMORY_LIMIT = 0.98
ERROR_RATE_LIMIT = 0.5
DEEP_TIMEOUT_S = 10.0  # longest time of a backend's short generation
DEEP_TOKENS = 5
SILENCE_HZ: Final = 16_000  # Whisper's rate
HEALTH = Caller("health", CallerRole.OPERATOR, "health")  # the caller of the probes


@dataclass(frozen=True, slots=True)
class HealthProbe:
    """Answers health checks; ``ping`` and ``ready`` only read known state.

    Args:
        model_loaded: whether the in-process engines and the adapters to preload are loaded.
        engines: the states of the in-process engines, by admission gate; likewise ``engine_figures``.
        state_store_ok: whether this gateway has the state that it needs to serve.
        gpus: the GPUs' figures; must not raise.
        pings: whether ``ping`` may already report that the process is alive; must stay true, since a
            container must not be killed because its engine restarts.
    """

    fleet: Fleet
    requests: InFlightRequests
    rolling_stats: RollingStats
    text: Callable[[str], ModelText]
    model_loaded: Callable[[], bool]
    engines: Mapping[str, Callable[[], EngineStatus]]
    engine_figures: Callable[[], Mapping[str, EngineFigures | None]]
    state_store_ok: Callable[[], bool]
    inspections: WorkerInspections
    routes: Callable[[], Mapping[str, Collection[str]]]
    clock: Callable[[], float]
    started_at: float
    gpus: Callable[[], Coroutine[None, None, Sequence[Mapping[str, float | None]]]] = read_gpus
    pings: Callable[[], bool] = lambda: True

    def ping(self) -> Mapping[str, object]:
        """Report liveness: the process answers; the engine is not checked. Raises BackendUnavailable."""
        if not self.pings():
            raise BackendUnavailable("not ready yet: server.ping is once_ready, see /ready")
        return {"status": "healthy", "uptime_seconds": round(self.clock() - self.started_at, 1)}

    def checks(self) -> Mapping[str, bool]:
        """Return the result of each readiness check; only reads known state."""
        loads = [backend.load for backend in self.fleet.backends.values()]
        return {
            "model_loaded": self.model_loaded(),
            "workers_ready": any(
                backend.state is BackendState.READY and not self.inspections.unusable(name)
                for name, backend in self.fleet.backends.items()
            ),
            "memory_available": not loads
            or any(load is None or load.kv_usage < MEMORY_LIMIT for load in loads),
            "error_rate_ok": not self.rolling_stats.failing(ERROR_RATE_LIMIT),
            "state_store": self.state_store_ok(),
            "not_draining": not self.requests.draining,
        }

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        checks = self.checks()
        ready = all(checks.values())
        engines = {name: one() for name, one in self.engines.items()}
        given_up = any(one.state is SupervisorState.GIVEN_UP for one in engines.values())
        status = "ready" if ready else "draining" if self.requests.draining else "not_ready"
        if status == "not_ready" and given_up:
            status = "engine_given_up"
        body: dict[str, object] = {"ready": ready, "status": status, "checks": checks}
        if self.inspections.latest:
            # The endpoint needs no key, so only names and counts are shown.
            body["workers"] = {
                name: {"usable": sum(not one.unusable for one in found), "of": len(found)}
                for name, found in self.inspections.latest.items()
            }
        shown = {name: one.shown() for name, one in engines.items()}
        if len(shown) == 1:
            [body["engine"]] = shown.values()
        elif shown:
            body["engines"] = shown
        return ready, body

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        """Generate a few tokens on all backends concurrently, outside admission and accounting."""
        async with asyncio.TaskGroup() as tasks:
            probes = tasks.create_task(self.probe(self.fleet.backends))
            gpus = tasks.create_task(self.gpus())
            workers = tasks.create_task(self.inspections.now())
        results = probes.result()
        healthy = {name for name, result in results.items() if result["status"] == "healthy"}
        # Healthy enough to serve: every route still has a healthy backend.
        served = all(healthy & set(names) for names in self.routes().values())
        body: dict[str, object] = {
            "status": "healthy" if len(healthy) == len(results) else "degraded" if served else "unhealthy",
            "backends": results,
            "workers": {name: [asdict(one) for one in found] for name, found in workers.result().items()},
            **self._engine_now(),
            "gpus": gpus.result(),
            "in_flight": self.requests.in_flight,
            "restarts_last_hour": sum(one().restarts_last_hour for one in self.engines.values()),
            **self.rolling_stats.figures(),
        }
        return bool(healthy) and served, body

    async def probe(self, names: Iterable[str]) -> dict[str, Mapping[str, object]]:
        """Probe each of these backends with a little work; return its latency or failure."""
        async with asyncio.TaskGroup() as tasks:
            probes = {name: tasks.create_task(self._probe(self.fleet.backends[name])) for name in names}
        return {name: probe.result() for name, probe in probes.items()}

    def _engine_now(self) -> dict[str, object]:
        """Return the load of the in-process engines together, or without any that of all backends."""
        loads = [one.load for one in self.engine_figures().values() if one is not None]
        loads = loads or [one.load for one in self.fleet.backends.values() if one.load is not None]
        if not loads:
            return {"running": None, "waiting": None, "kv_utilization": None}
        return {
            "running": sum(one.running for one in loads),
            "waiting": sum(one.waiting for one in loads),
            "kv_utilization": round(max(one.kv_usage for one in loads), 4),
        }

    async def _probe(self, backend: Backend) -> dict[str, object]:
        begun = self.clock()
        result: dict[str, object] = {"state": backend.state.value}
        try:
            async with asyncio.timeout(DEEP_TIMEOUT_S):
                token_ids = self._ids(backend)
                sampling = Sampling(max_tokens=DEEP_TOKENS, temperature=0.0)
                raw = token_ids and Feature.RAW_PROMPT in backend.features
                messages = () if raw else (Message(Role.USER, "test"),)
                work = Work(f"health-{backend.name}-{begun}", token_ids, messages, sampling)
                usage = await short_work(backend, work)
        except (BackendFailure, TimeoutError) as error:
            code = error.kind.value if isinstance(error, BackendFailure) else "timeout"
            return {**result, "status": "unhealthy", "error": code}
        load = backend.load
        return {
            **result,
            "status": "healthy",
            "latency_ms": round((self.clock() - begun) * 1000, 1),
            "output_tokens": usage.output_tokens,
            "running": load.running if load else None,
            "waiting": load.waiting if load else None,
            "kv_utilization": round(load.kv_usage, 4) if load else None,
        }

    def _ids(self, backend: Backend) -> tuple[int, ...]:
        """Return the probe's token ids; none if only the workers have the model's tokenizer."""
        try:
            return self.text(backend.model).tokenizer.encode("test")
        except NoTokenizer:
            return ()


async def short_work(backend: Backend, work: Work) -> Usage:
    """Let a backend do ``work``; of one that generates nothing, the first other work that it has a path for.

    Raises BackendFailure.
    """
    if not generates(backend):
        missing: BackendFailure | None = None
        for do in _other_work(backend):
            try:
                return Usage((await do()).input_tokens)
            except BackendFailure as error:
                # A worker's server answers so where it has no path for this work.
                if error.kind is not FailureKind.MODEL_NOT_FOUND:
                    raise
                missing = error
        if missing is not None:
            raise missing
    completion: Completion = await backend.generate(work, lambda delta: TAKEN)
    return completion.usage


def _other_work(
    backend: Backend,
) -> Iterator[Callable[[], Awaitable[PooledAnswer[Any]]]]:
    """Short pieces of the work that a backend may do: vectors, scores by either path, a transcript."""
    asked: dict[str, Any] = {
        "request_id": "health",
        "generation_id": "health",
        "caller": HEALTH,
        "arrived_at": 0.0,
        "created": 0,
        "model": backend.model,
        "tokens": 1,
    }
    if makes_vectors(backend):
        yield partial(backend.embed, EmbeddingsRequest(**asked, inputs=("test",)))
    if scores_texts(backend):
        pairs = ScoreRequest(**asked, pairs=(("test", "test"),), endpoint="rerank", options={})
        yield partial(backend.score, pairs)
        yield partial(backend.score, structs.replace(pairs, endpoint="score"))
    if transcribes(backend):
        yield partial(backend.transcribe, _silence(), HEALTH, no_event)


def _silence() -> Recording:
    """A second of silence."""
    file = BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(SILENCE_HZ)
        recording.writeframes(bytes(2 * SILENCE_HZ))
    return Recording(
        task="transcriptions",
        file=file,
        size=file.getbuffer().nbytes,
        filename="silence.wav",
        content_type="audio/wav",
        fields=(("response_format", "json"),),
        stream=False,
        wants_usage=False,
        tokens=TOKENS_PER_AUDIO_S,
    )
