"""The engine replicas of a Ray Serve application as one backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import structlog
from msgspec import structs

from admission.values import BackendLoad
from gateway.backends.partial_answer import check_partial
from gateway.backends.port import Absence, BackendState, Completion, Continue, DeltaSink, Work
from gateway.backends.prefix_hash import fingerprint, salt_number
from gateway.backends.workers.load import WorkerFigures, WorkerLoad, pool_load
from gateway.config.ray import RaySection
from gateway.contracts.features import Feature
from ops.ray.port import EngineReplicas, ReplicaLost, ReplicasFull
from ops.ray.wire import ReplicaPiece, ReplicaSignals, RouterHint, encode
from resilience.failures import BackendFailure, FailureKind
from resilience.retry_budget import CallBudget

# Seconds without figures of any replica after which all count as gone. Serve's table of replicas may be empty
# for a moment during a rolling update.
NO_REPLICAS_S = 10.0
# The same while replicas are listed but late: the machine may only be loaded, and Serve's health check, which
# takes at most 35 seconds, finds replicas that hang.
LATE_S = 60.0
# Rounds for which a replica without figures is avoided: it hangs, or is gone and Serve has not detected it,
# which takes one health check, at most 35 seconds.
MISSED_ROUNDS = 120
# Shortest timeout for the figures, seconds: a replica on a loaded machine may only be late.
LEAST_TIMEOUT_S = 1.0
# The same while no replica is known to be ready: no figures need to be kept up to date, and requests wait.
FIRST_TIMEOUT_S = 10.0
# Retry-after, in seconds, of a request for which no replica has room: Serve's own longest backoff.
FULL_RETRY_S = 0.5

# Failures that the replica causes, not the request.
_REPLICAS_FAULT = frozenset(
    {
        FailureKind.BACKEND_UNAVAILABLE,
        FailureKind.STREAM_BROKEN,
        FailureKind.TIMEOUT,
        FailureKind.INTERNAL,
        FailureKind.ENGINE_DEAD,
        FailureKind.CUDA_DRIVER_ERROR,
    }
)


@dataclass(eq=False)
class RayBackend:
    """Generates on the engine replica that Serve's router chooses; before a first token it may try another.

    A replica lost in the middle of an answer is ``engine_dead``; the caller resumes the answer by its token
    ids on another replica, or waits for one (:class:`gateway.backends.port.Restarting`). Serve replaces dead
    replicas, so they do not count for the circuit breaker.

    Args:
        kind: the engine's kind, as shown in answers.
        reporter_name: the name under which this gateway reports to the replicas.
        features: those until a replica reports its own; ``more``: those that the gateway adds to them;
            ``without``: those that the model lacks.
        max_running: most sequences in one replica's batch.
        queued: returns the number of requests that wait here for this backend, for autoscaling.
        on_max_model_len: called with the longest sequence that all replicas' engines support, in tokens.
    """

    name: str
    _: KW_ONLY
    kind: str
    model: str
    replicas: EngineReplicas
    features: frozenset[Feature]
    more: frozenset[Feature] = frozenset()
    without: frozenset[Feature] = frozenset()
    continues: frozenset[Continue]
    section: RaySection
    max_running: int
    reporter_name: str
    queued: Callable[[], int]
    on_max_model_len: Callable[[int], None]
    clock: Callable[[], float]
    ready_in_s: ClassVar[None] = None  # Serve does not report when a replica will be ready

    def __post_init__(self) -> None:
        self._load = WorkerLoad(interval_s=self.section.signals_seconds)
        self._ready: tuple[ReplicaSignals, ...] = ()
        # Replicas that reported figures before, with the number of rounds since then without figures.
        self._missing: Mapping[str, int] = {}
        self._reported_at = self.clock()  # time of the last figures or piece of an answer
        self._stopped = False
        self._news = asyncio.Event()
        self._log = structlog.get_logger("ops.ray").bind(backend=self.name)

    @property
    def state(self) -> BackendState:
        if self._stopped:
            return BackendState.STOPPED
        return BackendState.READY if self._ready else BackendState.STARTING

    @property
    def load(self) -> BackendLoad | None:
        reported = self._load.current(self.clock())
        if reported is None or not self._ready:
            return None
        room = self.max_running * len(self._ready)
        running = min(reported.running + reported.waiting, room)
        waiting = reported.running + reported.waiting - running
        return structs.replace(
            reported, running=running, waiting=waiting, max_running=room, workers=len(self._ready)
        )

    @property
    def absence(self) -> Absence:
        """Loading: Serve starts replicas until one is ready."""
        return Absence(f"no replica of {self.name} is ready", loading=True)

    async def wait_ready(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        return self.state is BackendState.READY

    async def run(self) -> None:
        try:
            while True:
                await self.ask()
                await asyncio.sleep(self.section.signals_seconds)
        finally:
            self._stopped = True
            self._news.set()

    async def ask(self) -> None:
        least_s = LEAST_TIMEOUT_S if self._ready else FIRST_TIMEOUT_S
        timeout_s = max(least_s, 2 * self.section.signals_seconds)
        try:
            reported = await self.replicas.signals(self.reporter_name, self.queued(), timeout_s)
            reason, limit_s = "no replica is there", NO_REPLICAS_S
        except (ReplicaLost, ReplicasFull) as error:
            reported, reason, limit_s = (), str(error), LATE_S
        if reported:
            self._reported_at = self.clock()
            self._update_replicas(reported)
            return
        silent_s = self.clock() - self._reported_at
        if self._ready and silent_s >= limit_s:
            self._log.warning("engine replicas are silent", seconds=round(silent_s), reason=reason)
            self._update_replicas(())

    def _update_replicas(self, reported: Sequence[ReplicaSignals]) -> None:
        names = {one.replica for one in reported}
        missed = {**{one.replica: 0 for one in self._ready}, **self._missing}
        self._missing = {
            name: rounds + 1
            for name, rounds in missed.items()
            if name not in names and rounds < MISSED_ROUNDS
        }
        before, self._ready = self._ready, tuple(one for one in reported if one.ready)
        if len(before) != len(self._ready):
            self._log.info("engine replicas", ready=len(self._ready), all=len(reported))
        if not self._ready:
            self._news.clear()
            return
        self._news.set()
        common = frozenset[Feature].intersection(*[one.features for one in self._ready])
        self.features = (common | self.more) - self.without
        loads = [one.load for one in self._ready]
        load = pool_load(loads, [0] * len(loads), self.max_running)
        assert load is not None, "the load of each of them is known"
        self._load.scraped(WorkerFigures(load), self.clock())
        lengths = [one.max_model_len for one in self._ready if one.max_model_len]
        if lengths:
            self.on_max_model_len(min(lengths))

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate on a replica; any early exit ends the call on the replica."""
        check_partial(work, self.continues, self.name)
        adapter = work.adapter.adapter_id if work.adapter is not None else None
        found = fingerprint(
            work.token_ids,
            work.prefix_tokens,
            self.section.affinity_block_tokens,
            salt_number(work.cache_salt, adapter),
        )
        route = RouterHint(tuple(found.chain), found.stable, adapter, tuple(self._missing))
        data = encode(work if work.calls is None else structs.replace(work, calls=None))
        ticket = self._load.sent(len(work.token_ids))
        try:
            return await self._tried(route, data, work.call_budget, out)
        finally:
            self._load.ended(ticket)

    async def _tried(self, route: RouterHint, data: bytes, calls: CallBudget, out: DeltaSink) -> Completion:
        for number in range(1, self.section.max_attempts + 1):
            attempt = _Attempt(out)
            try:
                return await self._attempt(route, data, attempt)
            except BackendFailure as failure:
                # Serve replaces a failing replica; the circuit breaker is for all replicas together.
                several = len(self._ready) + len(self._missing) > 1
                failure.isolated = failure.kind in _REPLICAS_FAULT and several
                last = number == self.section.max_attempts
                if last or attempt.delivered or not failure.policy.other_backend or not calls.take_extra():
                    raise
                self._log.info("tried another replica", replica=attempt.replica, failure=failure.kind.value)
            if attempt.replica:
                route = structs.replace(route, avoid=(*route.avoid, attempt.replica))
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, route: RouterHint, data: bytes, attempt: _Attempt) -> Completion:
        try:
            async with self.replicas.call(route, data) as pieces:
                while True:
                    piece = await self._next(pieces, attempt)
                    self._reported_at = self.clock()
                    if piece.replica:
                        attempt.replica = piece.replica
                    for delta in piece.deltas:
                        attempt.delivered = True
                        await attempt.out(delta)
                    if piece.failed is not None:
                        raise piece.failed.failure()
                    if piece.completion is not None:
                        return piece.completion
        except ReplicasFull as error:
            raise BackendFailure(
                FailureKind.THROTTLED, f"{self.name}: {error}", retry_after_s=FULL_RETRY_S
            ) from error
        except ReplicaLost as error:
            raise BackendFailure(FailureKind.ENGINE_DEAD, f"an engine replica went away: {error}") from error

    async def _next(self, pieces: AsyncIterator[ReplicaPiece], attempt: _Attempt) -> ReplicaPiece:
        limit_s = (
            self.section.idle_timeout_seconds
            if attempt.delivered
            else self.section.first_token_timeout_seconds
        )
        try:
            async with asyncio.timeout(limit_s):
                return await anext(pieces)
        except StopAsyncIteration:
            raise ReplicaLost("the answer ended before its end was reported") from None
        except TimeoutError:
            raise BackendFailure(
                FailureKind.TIMEOUT, f"an engine replica was silent for {limit_s:g} s"
            ) from None


@dataclass(slots=True)
class _Attempt:
    """One call to a replica: its sink, whether a part was delivered, and the replica's name."""

    out: DeltaSink
    delivered: bool = False
    replica: str = ""
