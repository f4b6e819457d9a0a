"""A backend for one model of a pool of workers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import structlog
from msgspec import Struct

from adapters.values import Adapter
from admission.values import BackendLoad
from gateway.backends.delta_forwarder import DeltaForwarder
from gateway.backends.partial_answer import check_partial, generate_rest
from gateway.backends.port import (
    READY,
    Absence,
    BackendState,
    Completion,
    DeltaSink,
    Work,
)
from gateway.backends.prefix_hash import fingerprint, salt_number
from gateway.backends.tool_bodies import with_allowed_tools
from gateway.backends.workers.answer import EVENT_STREAM, CompletionReader
from gateway.backends.workers.audio import transcript_of
from gateway.backends.workers.chunk_repair import whole_as_events
from gateway.backends.workers.client import Whole, WorkerClient, whole_body
from gateway.backends.workers.connection import Connection
from gateway.backends.workers.dialect import (
    CHAT_PATH,
    MAX_ECHOED_LOGPROBS,
    SHARED_SALT,
    CompletionWriter,
    Dialect,
    WrittenRequest,
    echoed_logprobs,
    supports_format,
)
from gateway.backends.workers.errors import (
    BadHttp,
    ConnectionLost,
    ConnectionsInUse,
    TimedOut,
    TransportError,
)
from gateway.backends.workers.hedging import HedgePolicy, Run, race
from gateway.backends.workers.in_service import OUTAGE_PROBE_S, WorkersInService
from gateway.backends.workers.inspection import Inspection, ServedModel, inspect
from gateway.backends.workers.loras import WorkerLoras
from gateway.backends.workers.pool import WorkerPool
from gateway.backends.workers.pool_model import ModelReading, PoolModel
from gateway.backends.workers.pooling import embed_body, score_body, scores_of, vectors_of
from gateway.backends.workers.refusal import DEFAULT_RETRY_AFTER_S, failure_of_transport, refusal_of
from gateway.backends.workers.worker import NOT_PROBED, NOT_READY, Worker
from gateway.backends.workers.worker_choice import NO_PREFERENCE, WorkerPreference
from gateway.config.backends import OpenAIBackend
from gateway.contracts.audio import EventSink, Recording, Transcript
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest, PooledRequest
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.front_headers import front_headers
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from gateway.contracts.sse import MAX_EVENT_BYTES
from gateway.contracts.values import PLAIN_TEXT, TEXT, Caller
from resilience.failures import BackendFailure, FailureKind, invalid_input
from resilience.turns import Turns

_generates = attrgetter("generates")
Part = TypeVar("Part", bound=PooledRequest)
Pooled = TypeVar("Pooled")

# When callers should try again while no worker is in service: each is probed several times a second then, and
# how long an outage will last is not known.
RETRY_S = 5.0
# Longest answer for one part of vectors or scores: 64 vectors of 65,536 numbers are 22 MB of base64.
MAX_PART_BYTES = 64 << 20

# Failures caused by the worker, not by the request.
_WORKERS_FAULT = frozenset(
    {
        FailureKind.BACKEND_UNAVAILABLE,
        FailureKind.STREAM_BROKEN,
        FailureKind.TIMEOUT,
        FailureKind.INTERNAL,
        FailureKind.ENGINE_DEAD,
        FailureKind.ACCESS_DENIED,
    }
)


class WorkersBackend:
    """Generates on one of several workers; retries on another when one fails before its first token.

    Also a :class:`gateway.backends.port.Restarting`: callers can wait until a worker is in service. The
    workers are those of a :class:`gateway.backends.workers.serving_pool.ServingPool` that list the model.

    Args:
        incapable: the features that a model lacks, whatever the workers support.
    """

    kind = "openai"

    def __init__(
        self,
        name: str,
        section: OpenAIBackend,
        *,
        model: PoolModel,
        workers: Sequence[Worker],
        writer: CompletionWriter,
        pool: WorkerPool[Worker],
        features: frozenset[Feature],
        clock: Callable[[], float],
        turns: Turns,
        incapable: Callable[[str], frozenset[Feature]],
    ) -> None:
        self.rename(name)
        self._section = section
        self._model = model
        self.continues = writer.continues
        self._features = features
        self._incapable = incapable
        # What the workers serve, and what they and the model can do; a request reads both many times.
        self.model = model.id
        self._workers = {worker.url: worker for worker in workers}
        self._writer = writer
        self._pool = pool
        self.in_service = WorkersInService(clock)
        self._clock = clock
        self._turns = turns
        # When a late request is sent to a second worker too; None: never.
        self.hedging = HedgePolicy(section.hedge) if section.hedge.enabled else None
        # Send prompts as token ids while every worker has the gateway's tokenizer.
        self._prompt_auto = section.prompt == "auto"
        self._same_tokenizer: dict[str, bool] = {}
        self._stopped = False
        self._warned_no_usage = False
        self._failures_in_a_row = Counter[str]()  # answered by a worker for this model, by the worker's URL
        self._take(model.reading)

    def rename(self, name: str) -> None:
        self.name = name
        self._log = structlog.get_logger("gateway.workers").bind(backend=name)

    @property
    def state(self) -> BackendState:
        """``READY`` while a worker is in service, else ``STARTING``; ``STOPPED`` after :meth:`run`."""
        if self._stopped:
            return BackendState.STOPPED
        return READY if self.in_service.serving else BackendState.STARTING

    @property
    def generates(self) -> bool:
        """Whether a worker may generate text; false once all are known to only embed, score or transcribe."""
        return any(map(_generates, self._workers.values()))

    @property
    def pauses(self) -> bool:
        return self._pool.rests(self._clock())

    @property
    def ready_in_s(self) -> float | None:
        """Seconds until a worker is expected back, estimated as the length of the outage so far.

        ``None`` while one is in service, and before the first one has been.
        """
        outage_s = self.in_service.outage_s
        return None if outage_s is None or self._stopped else max(OUTAGE_PROBE_S, outage_s)

    @property
    def absence(self) -> Absence:
        workers = self._workers.values()
        loading = any(worker.unavailable_reason in (NOT_PROBED, NOT_READY) for worker in workers)
        if len(workers) == 1:
            return Absence(f"worker {self.name} {next(iter(workers)).unavailable_reason}", loading, RETRY_S)
        counts = Counter(worker.unavailable_reason for worker in workers)
        reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.items())
        return Absence(
            f"none of the {len(workers)} workers of {self.name} is in service: {reasons}", loading, RETRY_S
        )

    async def wait_ready(self, timeout_s: float) -> bool:
        if not self._stopped:
            await self.in_service.wait(timeout_s)
        return self.state is READY

    @property
    def load(self) -> BackendLoad | None:
        return self._pool.load(self._clock())

    @property
    def known(self) -> bool:
        """Whether the model is known; until then it is to be the first one that a worker lists."""
        return self._model.known

    def serve_by(self, workers: Sequence[Worker]) -> None:
        if list(self._workers) == [worker.url for worker in workers]:
            return
        for url in self._workers.keys() - {worker.url for worker in workers}:
            self._model.gone(url)
            self._same_tokenizer.pop(url, None)
        self._workers = {worker.url: worker for worker in workers}
        self._pool.resize(workers)

    async def listed(self, url: str, found: ServedModel) -> None:
        before = self._model.lengths
        asks = None if self._writer.dialect is Dialect.OPENAI else self.ask
        await self._model.listed(url, found, asks)
        if len(lengths := self._model.lengths) > 1 and lengths != before:
            self._log.warning(
                "workers differ in length; the shortest holds", model=found.id, lengths=sorted(lengths)
            )
        if self._model.id != self.model:
            self._log.info("workers' model", model=self._model.id)
            self.model = self._model.id
            self._writer = replace(self._writer, model=self.model)
        self._take(self._model.reading)

    async def ask(self, path: str, body: bytes, timeout_s: float) -> Whole | None:
        """The answer of a random worker in service at ``path`` of its own; ``None`` when no worker is."""
        serving = [one for one in self._workers.values() if one.health.in_service]
        if not serving:
            return None
        client = random.choice(serving).client
        return await client.get(client.root + path, timeout_s=timeout_s, body=body)

    def _take(self, reading: ModelReading) -> None:
        self._reading, writer = reading, self._writer
        # Compares the workers' tokenizer with the gateway's.
        self.check = reading.check if self._prompt_auto else None
        # If the gateway cannot read the model's tokenizer, its token ids may be mere estimates.
        known, auto = reading.learn is None, self._section.dialect == "auto"
        self._writer = replace(
            writer,
            knows_vocabulary=known,
            token_ids=known and writer.token_ids,
            completes=not auto or self._model.completes,
        )
        self.features = self._features - self._incapable(self.model)
        if auto and self._model.ignores_ending:
            self.features -= {Feature.CONTINUE_FINAL_MESSAGE}
        self.continues = self._writer.continues

    async def inspect(
        self, sample_ids: Sequence[int] | None, max_model_len: int, *, generate: bool
    ) -> list[Inspection]:
        model, vllm = self.model if self.known else None, self._writer.dialect is Dialect.VLLM
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(
                    inspect(
                        worker.watcher,
                        url,
                        model,
                        sample_ids,
                        max_model_len,
                        generate=generate,
                        limit_field=self._section.chat_limit_field,
                        vllm=vllm,
                    )
                )
                for url, worker in self._workers.items()
            ]
        return [one.result() for one in asked]

    def detected(self, url: str, is_sluice: bool, *, same_tokenizer: bool) -> None:
        """Take what was detected about a worker: requests are written for a Sluice from now on if it is one.

        Prompts go as token ids while all workers detected so far have the gateway's tokenizer.
        """
        self._same_tokenizer[url] = same_tokenizer
        writer = self._writer
        if self._prompt_auto:
            writer = replace(
                writer, token_ids=self._reading.learn is None and all(self._same_tokenizer.values())
            )
        if is_sluice:
            writer = replace(writer, dialect=Dialect.SLUICE)
        self._writer, self.continues = writer, writer.continues

    def stop(self) -> None:
        """End every wait: no worker will come into service any more."""
        self._stopped = True
        self.in_service.close()

    def generate(self, work: Work, out: DeltaSink) -> Coroutine[Any, Any, Completion]:
        """Generate. Leaving early closes the connection, which ends the generation on the worker.

        A worker that fails before the first token is replaced by another; each is tried at most once.
        """
        plain = work.response_format.type is TEXT
        if not plain and not supports_format(self._writer.dialect, work.response_format.type):
            raise invalid_input(
                f"the workers of {self.name} cannot be asked for {work.response_format.type.value}",
                "response_format",
            )
        if work.sampling.echo and (echoed := echoed_logprobs(work)) > MAX_ECHOED_LOGPROBS:
            raise invalid_input(
                f"logprobs with echo is {echoed} log-probabilities (the prompt's tokens * (logprobs + 1));"
                f" allowed: {MAX_ECHOED_LOGPROBS} or fewer",
                "logprobs",
            )
        if work.partial is None:
            return self._generate(work, out)
        check_partial(work, self._writer.ways(work), self.name)
        return generate_rest(self._generate, work, out, trimmed=self._writer.path(work) == CHAT_PATH)

    # These methods return the coroutine of `_posted`: one of their own would be resumed at every wait.

    def embed(self, part: EmbeddingsRequest) -> Coroutine[Any, Any, EmbeddingsAnswer]:
        return self._posted(part, "/embeddings", embed_body(part), vectors_of)

    def score(self, part: ScoreRequest) -> Coroutine[Any, Any, ScoreAnswer]:
        return self._posted(part, f"/{part.endpoint}", score_body(part), scores_of)

    async def transcribe(
        self, recording: Recording, caller: Caller, out: EventSink, trace_headers: bytes = b""
    ) -> Transcript:
        """The text of a recording; no other worker is asked once a part of the text was pushed."""
        return await self._pooled(
            caller,
            recording.tokens,
            trace_headers,
            lambda client, headers: transcript_of(client, self.model, recording, headers, out),
        )

    def _posted(
        self, part: Part, path: str, body: bytes, read: Callable[[Part, bytes], Pooled]
    ) -> Coroutine[Any, Any, Pooled]:
        """Post to a worker. The answers of a worker's batch arrive together, so they are read in turn."""

        async def ask(client: WorkerClient, headers: bytes) -> Pooled:
            connection = await client.post(path, body, headers)
            try:
                if connection.status != 200:
                    raise await refusal_of(connection, model=self.model)
                data = await whole_body(connection, MAX_PART_BYTES)
            finally:
                connection.release()
            await self._turns.next()
            return read(part, data)

        return self._pooled(part.caller, part.tokens, part.trace_headers, ask)

    async def _pooled(
        self,
        caller: Caller,
        tokens: int,
        headers: bytes,
        ask: Callable[[WorkerClient, bytes], Awaitable[Pooled]],
    ) -> Pooled:
        """Ask a worker; after a failure ask another one. Each worker is tried at most once."""
        if self._writer.dialect is Dialect.SLUICE:
            headers += front_headers(caller.tenant, caller.org, SHARED_SALT)
        tried: set[str] = set()
        failure: BackendFailure | None = None
        while len(tried) < self._section.max_attempts:
            worker = self._pool.pick(NO_PREFERENCE, tried, self._clock())
            if worker is None:
                break
            tried.add(worker.url)
            ticket = self._pool.sent(worker, tokens, NO_PREFERENCE)
            try:
                answer = await ask(worker.client, headers)
                self._succeeded(worker)
                return answer
            except TransportError as error:
                await self._broke(worker, error)
                failure = failure_of_transport(error, delivered=False)
            except BackendFailure as error:
                self._failed(worker, error)
                failure = error
            finally:
                self._pool.ended(worker, ticket)
            self._isolate(failure, tried)
            if failure.no_retry_here or not failure.policy.other_backend:
                break
            self._log.info("worker failed", worker=worker.url, failure=failure.kind.value)
        raise failure or self._none_in_service()

    async def _generate(self, work: Work, out: DeltaSink) -> Completion:
        writer = self._writer
        lacking = set() if work.adapter is None else self._without(work.adapter)
        tried = set(lacking)
        most, alone = len(tried) + self._section.max_attempts, len(self._workers) == 1
        preference = NO_PREFERENCE if alone else self._preference(work)
        request = _Request(writer.write(work, self._clock()), work, preference, most)
        failure: BackendFailure | None = None
        broke = work.call_budget.broke
        while len(tried) < most:
            # One that broke off a part of this answer is asked again only if there is no other.
            worker = None
            if broke:
                worker = self._pool.pick(request.preference, tried.union(broke), self._clock())
            worker = worker or self._pool.pick(request.preference, tried, self._clock())
            # The caller has taken the first call out of the budget.
            if worker is None or (failure is not None and not work.call_budget.take_extra()):
                break
            tried.add(worker.url)
            attempt = _Attempt(out)
            try:
                if self.hedging is None or alone:
                    return await self._on(worker, request, attempt)
                return await self._hedged(self.hedging, worker, request, tried, attempt)
            except BackendFailure as error:
                failure = error
            self._isolate(failure, tried)
            if attempt.delivered or failure.no_retry_here or not failure.policy.other_backend:
                raise failure
            self._log.info("worker failed", worker=worker.url, failure=failure.kind.value)
        raise failure or self._none_in_service(lacking)

    def _isolate(self, failure: BackendFailure, tried: Collection[str]) -> None:
        """Keep a failure from the pool's circuit breaker if the workers' health has counted it.

        When no worker is left the pool's state reports it; an open circuit would outlast a worker's return.
        """
        if failure.kind in _WORKERS_FAULT and (not self.in_service.serving or self._others_serve(tried)):
            failure.isolated = True

    def _without(self, adapter: Adapter) -> set[str]:
        """The URLs of the workers without ``adapter``, if it is one that workers list as their own."""
        if adapter.at is None:
            return set()
        return {url for url, one in self._workers.items() if adapter.adapter_id not in one.own_loras}

    def _others_serve(self, tried: Collection[str]) -> bool:
        return any(one.health.in_service for url, one in self._workers.items() if url not in tried)

    async def _hedged(
        self, policy: HedgePolicy, worker: Worker, request: _Request, tried: set[str], attempt: _Attempt
    ) -> Completion:
        """Send to ``worker``, and when it is late also to another one not in ``tried``."""

        def on(one: Worker, *, hedge: bool) -> Run:
            return lambda push: self._on(one, request, _Attempt(push), hedge=hedge)

        def second() -> Run | None:
            budget = request.work.call_budget
            if len(tried) >= request.most or not budget.extra:
                return None
            other = self._pool.pick(request.preference, tried, self._clock())
            if other is None or not policy.grant():
                return None
            budget.take_extra()
            tried.add(other.url)
            self._log.info("sent to a second worker", late=worker.url, worker=other.url)
            return on(other, hedge=True)

        def push(delta: Delta) -> Awaitable[None]:
            attempt.delivered = True
            return attempt.out(delta)

        policy.record_request()
        late_after_s = policy.late_after_s(self._clock())
        first = on(worker, hedge=False)
        return await race(first, second, push, late_after_s=late_after_s, policy=policy, clock=self._clock)

    async def _on(
        self, worker: Worker, request: _Request, attempt: _Attempt, *, hedge: bool = False
    ) -> Completion:
        """Send to one worker, and record the call in its health, its load and the trace."""
        work = request.work
        with work.calls.call(worker.url, hedge=hedge) if work.calls else nullcontext() as call:
            if call is not None:
                attempt.headers = call.headers
            ticket = self._pool.sent(worker, work.input_tokens, request.preference)
            try:
                loras = worker.loras
                adapter = None if loras is None else self._writer.to_load(work)
                if adapter is None or loras is None:
                    completion = await self._exchange(worker, request, attempt)
                else:
                    completion = await self._with_adapter(adapter, loras, worker, request, attempt)
                self._succeeded(worker)
                return completion
            except TransportError as error:
                await self._broke(worker, error)
                if attempt.delivered:
                    work.call_budget.broke += (worker.url,)
                raise failure_of_transport(error, delivered=attempt.delivered) from error
            except BackendFailure as error:
                if work.deadline is None or self._clock() < work.deadline:
                    self._failed(worker, error)
                raise
            finally:
                self._pool.ended(worker, ticket)

    async def _with_adapter(
        self, adapter: Adapter, loras: WorkerLoras, worker: Worker, request: _Request, attempt: _Attempt
    ) -> Completion:
        async with loras.hold(adapter) as load:
            try:
                return await self._exchange(worker, request, attempt)
            except BackendFailure as error:
                missing = error.kind is FailureKind.MODEL_NOT_FOUND and not attempt.delivered
                if not missing or not request.work.call_budget.take_extra():
                    raise
            loras.lost(adapter.adapter_id, load)
        # Another gateway unloaded the adapter, or the worker has restarted: load it and send once more.
        async with loras.hold(adapter):
            return await self._exchange(worker, request, attempt)

    async def _exchange(self, worker: Worker, request: _Request, attempt: _Attempt) -> Completion:
        work, written = request.work, request.written
        connection = await worker.client.post(written.path, written.body, written.headers + attempt.headers)
        try:
            if connection.status != 200:
                raise await self._refusal(worker, connection, work)
            streams = connection.content_type.startswith(EVENT_STREAM)
            reader = CompletionReader(
                work,
                self._reading.token_bytes,
                running_counts=written.running_counts,
                custom_tools=written.custom_tools,
            )
            gather = None if work.stream else connection.gather
            forwarder = DeltaForwarder(reader, attempt.out, connection.first_token_received, gather)
            more = streams
            try:
                if not streams:
                    forwarder.take(await _whole_answer(connection))
                    await forwarder.rest()
                while more and not reader.done:
                    more = await connection.pass_on(forwarder.take)
                    await forwarder.rest()
            except (ConnectionLost, TimedOut):
                if not reader.ended:
                    raise
                more = False  # only the usage is missing
            finally:
                attempt.delivered = forwarder.delivered
                forwarder.close()
            rest, completion = reader.finish()
            if rest is not None:
                attempt.delivered = True
                await attempt.out(rest)
            if more:
                connection.linger()  # the end of the body frees it, so nothing may wait before its release
        finally:
            connection.release()
        learn = self._reading.learn
        # Nothing is learned from the rest of an answer: its partial answer is counted as prompt tokens.
        own_prompt = reader.has_usage and work.partial is None
        if learn is not None and own_prompt and not self._writer.token_ids:
            sent = work if written.custom_tools else with_allowed_tools(work)
            learn(sent, completion.usage.input_tokens)
        if not reader.has_usage and not self._warned_no_usage:
            self._warned_no_usage = True
            self._log.warning("no usage reported; tokens are counted from the chunks", worker=worker.url)
        return completion

    async def _refusal(self, worker: Worker, connection: Connection, work: Work) -> BackendFailure:
        """Read why the worker refused the request, and record it; returns the failure."""
        name = self._writer.adapter_name(work)
        failure = await refusal_of(connection, model=name or self._writer.model, adapter=name is not None)
        forced = work.tool_choice is not None and work.tool_choice.forces_call
        if failure.kind is FailureKind.INTERNAL and (forced or work.response_format != PLAIN_TEXT):
            # Some schemas and patterns make a server answer 500 (vLLM's compiler of grammars fails): a caller
            # who sends them must not keep the others from the workers.
            failure.isolated = True
        if name is not None and failure.kind is FailureKind.MODEL_NOT_FOUND:
            worker.lost(name)
            self._pool.lost(worker.url, name)
            if work.adapter is not None and work.adapter.at is not None:
                worker.detect_again()
        elif failure.kind is FailureKind.MODEL_NOT_FOUND:
            worker.detect_again()
        return failure

    def _preference(self, work: Work) -> WorkerPreference:
        adapter = self._writer.adapter_name(work)
        # A worker's index of sent blocks covers all models of the pool, so the salt names the model.
        salt = salt_number(self._writer.cache_salt(work), adapter or self.model)
        found = fingerprint(work.token_ids, work.prefix_tokens, self._section.affinity_block_tokens, salt)
        return WorkerPreference(*found, adapter)

    async def _broke(self, worker: Worker, error: TransportError) -> None:
        if not isinstance(error, ConnectionsInUse):
            await worker.broke(error)
            worker.failed(last=not self._others_serve((worker.url,)))

    def _succeeded(self, worker: Worker) -> None:
        worker.health.succeeded(self._clock())
        self._failures_in_a_row.pop(worker.url, None)

    def _failed(self, worker: Worker, error: BackendFailure) -> None:
        if error.kind is FailureKind.ACCESS_DENIED and worker.refuses_probes:
            error.isolated = False  # all requests, not only this one's text
        if error.kind is FailureKind.THROTTLED and error.isolated and error.param is None:
            # With a param only an adapter found no place. A Sluice refuses requests by their tenant and
            # priority: it serves others meanwhile.
            error.isolated = self._writer.dialect is not Dialect.SLUICE
            if error.isolated:
                self._pool.rest(worker, self._clock() + (error.retry_after_s or 0.0))
        elif error.kind is FailureKind.ENGINE_DEAD:
            worker.end("has a dead engine")
        elif error.kind in _WORKERS_FAULT and not error.isolated:
            if worker.serves_several:  # it answered, and its other models may be well
                self._failures_in_a_row[worker.url] += 1
                now, most = self._clock(), self._section.eject_after_failures
                others = self._pool.pick(NO_PREFERENCE, (worker.url,), now) is not None
                if self._failures_in_a_row[worker.url] >= most and others:
                    self._pool.rest(worker, now + self._section.eject_seconds)
                return
            worker.failed(last=not self._others_serve((worker.url,)))

    def _none_in_service(self, lacking: Collection[str] = ()) -> BackendFailure:
        """Why no worker can be asked; ``lacking``: the URLs of those without the request's adapter."""
        usable = [one for url, one in self._workers.items() if url not in lacking]
        serving = [one for one in usable if one.health.in_service]
        if serving:
            rest_s = min(map(self._pool.resting_until, serving)) - self._clock()
            return BackendFailure(
                FailureKind.THROTTLED,
                f"the workers of {self.name} asked for a pause, or rest after failures",
                retry_after_s=max(rest_s, DEFAULT_RETRY_AFTER_S),
                isolated=True,
            )
        return BackendFailure(
            FailureKind.BACKEND_UNAVAILABLE,
            f"no worker of {self.name}{' with the adapter' if lacking else ''} is in service",
            retry_after_s=RETRY_S,
            isolated=True,
        )


class _Request(Struct, frozen=True):
    """The work as it is sent to a worker; ``most``: workers to try plus those that lack its adapter."""

    written: WrittenRequest
    work: Work
    preference: WorkerPreference
    most: int


class _Attempt(Struct, eq=False):
    """The sink of an attempt, and whether it got a delta; ``headers`` are sent with the request."""

    out: DeltaSink
    delivered: bool = False
    headers: bytes = b""


async def _whole_answer(connection: Connection) -> bytes:
    """The answer of a server that does not stream, as events. Raises TransportError."""
    kind = connection.content_type
    with suppress(ValueError, TypeError, RecursionError):
        if "json" in kind:
            return whole_as_events(await whole_body(connection, MAX_EVENT_BYTES))
    raise BadHttp(f"it answered {_printable(kind)} instead of {EVENT_STREAM}")


def _printable(content_type: str) -> str:
    bare = content_type.split(";")[0].strip()
    return bare if bare.isprintable() and 0 < len(bare) <= 64 else "something"
