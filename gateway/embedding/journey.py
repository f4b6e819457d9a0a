"""The stages of a request for vectors, scores of texts or transcripts, in order.

::

    HTTP → value → choose backends → limits → open account
         → parts, each: admit → worker → results → respond → account
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeGuard, TypeVar

from msgspec import Struct, structs

from accounting.account import CANCELLED, Accounts
from accounting.values import PartialUsage, UsageRow
from admission.controller import AdmissionController
from admission.errors import Refused
from admission.values import AdmissionLimits, Demand
from budgeting.estimating import rough_text_tokens
from gateway.backends.port import (
    Backend,
    BackendState,
    Embeds,
    Fleet,
    Ranks,
    Transcribes,
    makes_vectors,
    scores_texts,
    transcribes,
)
from gateway.contracts.audio import CONTRACT as AUDIO
from gateway.contracts.audio import AudioRequest, EventSink, Transcript, no_event
from gateway.contracts.embeddings import CONTRACT as EMBEDDINGS
from gateway.contracts.embeddings import (
    Conversation,
    EmbeddingInput,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    PooledAnswer,
    PooledRequest,
)
from gateway.contracts.openai_answer import sent_status
from gateway.contracts.rerank import CONTRACT as RERANK
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from gateway.contracts.values import Contract
from gateway.errors import RateLimited, UnknownModel, public_error
from gateway.keys.rate_limits import KeyLimiter, paying
from gateway.requests.answer import estimated_cost
from gateway.requests.in_flight import InFlightRequests
from gateway.requests.request_record import Reporter
from gateway.routing.revision import Revision
from gateway.routing.target import nearest, require_known
from observability.events import DISCONNECTED, RequestRecord
from observability.trace_context import RootSpan
from resilience.failures import BackendFailure, FailureKind
from resilience.task_groups import all_or_error
from resilience.turns import Turns

PART_TOKENS: Final = 8_192
PART_INPUTS: Final = 64
"""Most tokens and inputs of one call to a worker, so that a request's parts spread over workers."""
AT_ONCE: Final = 8  # most parts of one request in progress at a time
PRIORITY: Final = -1  # the lowest priority, because a person waits for a chat
MAX_WAIT_S: Final = 60.0
"""Longest wait of a part: a large request's parts wait for each other, and nobody reads along."""
BYTES_PER_TOKEN: Final = 16  # memory that a waiting part takes per token


Backed = TypeVar("Backed", bound=Backend)
One = TypeVar("One")
Input = TypeVar("Input")
Asked = TypeVar("Asked", bound=PooledRequest)


@dataclass(frozen=True, slots=True)
class EmbeddingJourney:
    """Makes vectors, scores and transcripts. Each part of a request is billed once, even after retries.

    ``limits``: the admission limits of each part.
    """

    in_flight: InFlightRequests
    revision: Callable[[], Revision]
    fleet: Fleet
    admission: AdmissionController
    limits: AdmissionLimits
    accounts: Accounts
    limiter: KeyLimiter
    reporter: Reporter
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    turns: Turns

    def may_ask(self, request: PooledRequest) -> bool:
        try:
            if isinstance(request, EmbeddingsRequest):
                self._backends(_vectors(request))
            elif isinstance(request, ScoreRequest):
                self._backends(_scores(request))
            elif isinstance(request, AudioRequest):
                self._backends(_transcript(request, no_event))
        except UnknownModel:
            return False
        return True

    async def run(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        return await self._run(request, _vectors, list(split(request.inputs, input_tokens)))

    async def score(self, request: ScoreRequest) -> ScoreAnswer:
        parts = list(split(request.pairs, lambda pair: sum(map(_text_tokens, pair))))
        return await self._run(request, _scores, parts)

    async def transcribe(self, request: AudioRequest, out: EventSink) -> Transcript:
        part = InputPart((request.recording,), request.recording.tokens)
        return await self._run(request, partial(_transcript, out=out), [part])

    async def _run(
        self, request: Asked, work_of: Callable[[Asked], _PooledWork[Backed, One]], parts: Sequence[InputPart]
    ) -> PooledAnswer[One]:
        span = self.reporter.trace(request)
        # Workers get the root span's context: their calls have no spans of their own.
        work = work_of(structs.replace(request, trace_headers=span.headers(0)))
        bills: list[UsageRow] = []
        try:
            with self.in_flight.counted():
                answer = await self._stages(work, parts, span.trace_id, bills)
        except asyncio.CancelledError:
            self._report(work, span, bills, DISCONNECTED, "cancelled", None)
            raise
        except Exception as error:
            public = public_error(error)
            # The bill of a failed request names a backend only if a stream of it had begun, with 200.
            status = 200 if bills and bills[0].backend else sent_status(public, Contract.CHAT)
            self._report(work, span, bills, status, public.code, public.message)
            raise
        # Metrics and log are written in the loop's next turn, after the answer is sent.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._report, work, span, bills, 200, None, None)
        return answer

    async def _stages(
        self,
        work: _PooledWork[Backed, One],
        parts: Sequence[InputPart],
        trace_id: str,
        bills: list[UsageRow],
    ) -> PooledAnswer[One]:
        request, backends = work.request, self._backends(work)
        tokens = sum([part.tokens for part in parts])
        row = self._opening_row(work, trace_id)
        cost = partial(estimated_cost, row, backends[0], tokens, 0, self.accounts.price)
        reservation = None
        if not request.for_cache:
            reservation = await self.limiter.reserve(request.caller, tokens, cost, backends[0].model)
        so_far = partial(_failed, row, work.so_far)
        try:
            with self.accounts.open(row, so_far, paying(reservation, bills.append)) as account:
                if len(parts) == 1:
                    by, made = await self._part(work, parts[0], backends)
                else:
                    by, made = await self._made(work, parts, backends)
                account.settle(
                    structs.replace(
                        _with_backend(row, by),
                        input_tokens=made.input_tokens,
                        output_tokens=made.output_tokens,
                        finish_reason="stop",
                        total_ms=(self.clock() - request.arrived_at) * 1000,
                    ).delivered()
                )
                await self.accounts.durable()
                await self.turns.next()  # rows are durable in groups
        finally:
            if reservation is not None:
                reservation.settle(sum([one.input_tokens + one.output_tokens for one in bills]))
        return made

    def _backends(self, work: _PooledWork[Backed, One]) -> Sequence[Backed]:
        """The backends that may answer, in the configuration's order.

        Raises UnknownModel; BackendUnavailable: not all models are known yet.
        """
        caller, asked = work.request.caller, work.request.model
        named = dict(caller.aliases).get(asked, asked) if caller.aliases else asked
        named = self.fleet.aliases.get(named, named)
        reached = None if caller.routes is None else _reached(caller.routes, self.revision())

        def usable_of(backends: Iterable[tuple[str, Backend]]) -> list[Backed]:
            return [
                one
                for name, one in backends
                if work.able(one) and caller.may_use(one.model) and (reached is None or name in reached)
            ]

        fleet = self.fleet.backends
        found = usable_of([(name, one) for name, one in fleet.items() if named in (one.model, one.name)])
        if found:
            return found
        require_known(fleet.values())
        usable = usable_of(fleet.items())
        if not usable:
            raise UnknownModel(f"no backend here {work.does}; configure workers that do", param="model")
        known = nearest(asked, {one.model for one in usable})
        raise UnknownModel(f"no worker {work.does} with {asked!r}; {known}", param="model")

    async def _made(
        self, work: _PooledWork[Backed, One], parts: Sequence[InputPart], backends: Sequence[Backed]
    ) -> tuple[Backed, PooledAnswer[One]]:
        """The backend of the last part, and the results of all parts as from it.

        The first failure cancels the other parts.
        """
        at_once = asyncio.Semaphore(AT_ONCE)

        async def one(part: InputPart) -> tuple[Backed, PooledAnswer[One]]:
            async with at_once:
                return await self._part(work, part, backends)

        async with all_or_error() as group:
            tasks = [group.create_task(one(part)) for part in parts]
        backend = tasks[-1].result()[0]
        made = [task.result()[1] for task in tasks]
        return backend, PooledAnswer(
            backend.model,
            [one for part in made for one in part.results],
            sum([part.input_tokens for part in made]),
            sum([part.output_tokens for part in made]),
        )

    async def _part(
        self, work: _PooledWork[Backed, One], part: InputPart, backends: Sequence[Backed]
    ) -> tuple[Backed, PooledAnswer[One]]:
        """The first backend that can make the results of a part, and the results."""
        failure: Refused | BackendFailure | None = None
        if len(backends) > 1:  # unready ones come last; their errors tell why
            backends = sorted(backends, key=lambda one: one.state is not BackendState.READY)
        for backend in backends:
            try:
                async with self.admission.admit(self._demand(work, part, backend)) as slot:
                    is_ready = backend.state is BackendState.READY
                    try:
                        made = await work.ask(backend, part)
                        if len(made.results) != len(part.inputs):
                            text = f"it gave {len(made.results)} results for {len(part.inputs)} inputs"
                            raise BackendFailure(FailureKind.INTERNAL, text)
                    except (BackendFailure, RateLimited) as error:
                        if isinstance(error, RateLimited) or not error.counts or not is_ready:
                            slot.ignored()  # a fault of the request, or of a backend whose state shows it
                        raise
                    # For a worker the whole request is like a prompt's work before the first token.
                    slot.first_token(None)
                    return backend, made
            except (Refused, BackendFailure) as error:
                failure = error
                if isinstance(error, BackendFailure) and (
                    error.no_retry_here or not error.policy.other_backend
                ):
                    break
        assert failure is not None
        if isinstance(failure, BackendFailure) and failure.kind is FailureKind.MODEL_NOT_FOUND:
            raise UnknownModel(f"no worker {work.does} with {work.request.model!r}", param="model")
        raise failure

    def _demand(self, work: _PooledWork[Backed, One], part: InputPart, backend: Backend) -> Demand:
        return Demand(
            backend=backend.name,
            tenant=work.request.caller.tenant,
            priority=PRIORITY,
            input_tokens=part.tokens,
            max_output_tokens=1,
            arrived_at=work.request.arrived_at,
            kind=(work.contract, backend.model),
            cached_tokens=0,
            size_bytes=BYTES_PER_TOKEN * part.tokens,
            limits=self.limits,
            generates=False,
        )

    def _opening_row(self, work: _PooledWork[Backed, One], trace_id: str) -> UsageRow:
        request, caller = work.request, work.request.caller
        return UsageRow(
            generation_id=request.generation_id,
            request_id=request.request_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            contract=work.contract,
            route=work.contract,
            started_at=self.unix_time(),
            kind="cache" if request.for_cache else "front" if caller.by_front else "request",
            org=caller.org,
            user_id=request.user,
            revision=self.revision().number,
            trace_id=trace_id,
        )

    def _report(
        self,
        work: _PooledWork[Backed, One],
        span: RootSpan,
        bills: Sequence[UsageRow],
        status: int,
        code: str | None,
        message: str | None,
    ) -> None:
        request, bill = work.request, bills[0] if bills else None
        record = RequestRecord(
            request_id=request.request_id,
            generation_id=request.generation_id,
            trace_id=span.trace_id,
            tenant=request.caller.tenant,
            key_id=request.caller.key_id,
            contract=work.contract,
            status=status,
            total_ms=(self.clock() - request.arrived_at) * 1000,
            route=work.contract,
            model=bill.model if bill else request.model,
            backend=bill.backend if bill else None,
            backend_name=bill.backend_name if bill and bill.backend else None,
            error_code=code,
            error_message=message,
            finish_reason="stop" if status == 200 else "cancelled" if code == "cancelled" else "error",
            input_tokens=bill.input_tokens if bill else 0,
            output_tokens=bill.output_tokens if bill else 0,
            cost_nanousd=bill.cost_nanousd if bill and bill.price_version is not None else None,
        )
        self.reporter.report(span, record)


@dataclass(frozen=True, slots=True)
class InputPart:
    """Inputs of one call to a worker; ``tokens`` is an estimate, ``first`` the index of the first input."""

    inputs: tuple[Any, ...]
    tokens: int
    first: int = 0


class _PooledWork(Struct, Generic[Backed, One], frozen=True):
    """A request's work: which backends are able to do it, and how one is called for a part.

    ``does`` names the work. ``so_far``: the bill of a failed request, by default nothing.
    """

    request: PooledRequest
    contract: str
    does: str
    able: Callable[[Backend], TypeGuard[Backed]]
    ask: Callable[[Backed, InputPart], Awaitable[PooledAnswer[One]]]
    so_far: Callable[[UsageRow], PartialUsage] = partial(PartialUsage, delivered=False)


def _vectors(request: EmbeddingsRequest) -> _PooledWork[Embeds, str]:
    def ask(backend: Embeds, part: InputPart) -> Awaitable[EmbeddingsAnswer]:
        first = part.first if len(request.inputs) > 1 else None
        return backend.embed(
            structs.replace(request, model=backend.model, inputs=part.inputs, tokens=part.tokens, first=first)
        )

    return _PooledWork(request, EMBEDDINGS, "makes vectors", makes_vectors, ask)


def _scores(request: ScoreRequest) -> _PooledWork[Ranks, float]:
    def ask(backend: Ranks, part: InputPart) -> Awaitable[ScoreAnswer]:
        return backend.score(
            structs.replace(request, model=backend.model, pairs=part.inputs, tokens=part.tokens)
        )

    return _PooledWork(request, RERANK, "scores texts", scores_texts, ask)


def _transcript(request: AudioRequest, out: EventSink) -> _PooledWork[Transcribes, Mapping[str, Any] | None]:
    streaming: list[Transcribes] = []

    def ask(backend: Transcribes, part: InputPart) -> Awaitable[Transcript]:
        async def push(event: bytes) -> None:
            if not streaming:
                streaming.append(backend)
            await out(event)

        return backend.transcribe(request.recording, request.caller, push, request.trace_headers)

    def so_far(row: UsageRow) -> PartialUsage:
        """Bill a stream that failed after it began by the recording's estimated tokens."""
        if not streaming:
            return PartialUsage(row, delivered=False)
        used = structs.replace(_with_backend(row, streaming[0]), input_tokens=request.recording.tokens)
        return PartialUsage(used, delivered=True)

    return _PooledWork(request, AUDIO, "transcribes speech", transcribes, ask, so_far)


def _failed(row: UsageRow, so_far: Callable[[UsageRow], PartialUsage], error: BaseException) -> PartialUsage:
    code = public_error(error).code if isinstance(error, Exception) else CANCELLED
    return so_far(structs.replace(row, error_code=code))


def _with_backend(row: UsageRow, backend: Backend) -> UsageRow:
    return structs.replace(row, backend=backend.kind, backend_name=backend.name, model=backend.model)


def _text_tokens(text: str) -> int:
    return max(1, round(rough_text_tokens(text)))


def input_tokens(one: EmbeddingInput) -> int:
    """The number of tokens of an input; an estimate for a text."""
    if isinstance(one, Conversation):
        return sum([_text_tokens(str(message["content"])) for message in one.messages])
    return _text_tokens(one) if isinstance(one, str) else len(one)


def split(inputs: Sequence[Input], tokens_of: Callable[[Input], int]) -> Iterator[InputPart]:
    """The inputs in parts, in order; a part ends before it exceeds a bound, but has at least one input."""
    part: list[Input] = []
    part_tokens = 0
    for index, one in enumerate(inputs):
        tokens = tokens_of(one)
        if part and (part_tokens + tokens > PART_TOKENS or len(part) >= PART_INPUTS):
            yield InputPart(tuple(part), part_tokens, index - len(part))
            part, part_tokens = [], 0
        part.append(one)
        part_tokens += tokens
    yield InputPart(tuple(part), part_tokens, len(inputs) - len(part))


def _reached(routes: Collection[str], revision: Revision) -> set[str]:
    """The names of the backends that a key limited to these routes can use."""
    return {name for route in routes if route in revision.routes for name in revision.routes[route].backends}
