"""Runs each line of a batch and returns the answer that its endpoint would give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import orjson
from msgspec import structs

from accounting.account import HeldRows
from accounting.batch_tables import BatchLine, BatchRow
from accounting.stored_responses import StoredResponse
from gateway.batches.outcome import LineOutcome
from gateway.batches.reading import LineFault
from gateway.contracts.answer import Answer
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.embeddings import EmbeddingsBody, embeddings_request
from gateway.contracts.openai_answer import error_json
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed, parse
from gateway.contracts.responses.body import ResponsesBody
from gateway.contracts.responses.stream import whole_response
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidKey, PublicError, public_error
from gateway.http.body import body_too_large
from gateway.http.embeddings import vectors_body
from gateway.http.generate import in_time, run_journey
from gateway.http.generating import dialects_of
from gateway.http.respond import CALLER_ERRORS, log_defect
from gateway.http.responses import asked_of
from gateway.http.sinks import WholeSink
from gateway.ports import Services
from resilience.failures import FailureKind

EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
PAUSE_S: Final = 2.0  # pause before a retry of a line that was refused without a retry time
_ENGINE_DEATHS: Final = frozenset(
    {
        FailureKind.CUDA_OOM,
        FailureKind.CUDA_DRIVER_ERROR,
        FailureKind.ENGINE_DEAD,
        FailureKind.WORKER_RESTARTED,
    }
)
_RETRYABLE: Final = frozenset({FailureKind.BACKEND_UNAVAILABLE, FailureKind.THROTTLED, FailureKind.PREEMPTED})


class BatchLines:
    """Answers the lines of batches with a gateway's services; their journeys settle into ``bills``.

    ``stopping``: whether the gateway drains.
    """

    def __init__(self, services: Services, bills: HeldRows, stopping: Callable[[], bool]) -> None:
        self._services = services
        self._bills = bills
        self.stopping = stopping
        self._dialects = dialects_of(services)

    def ready(self) -> bool:
        return not self.stopping() and self._services.health.ready()[0]

    def fault(self, batch: BatchRow, body: bytes) -> LineFault | None:
        """The fault for which the contract refuses a line; an engine's refusal is in the line's result."""
        nobody = Caller(batch.tenant, CallerRole.CALLER, batch.key_id)
        try:
            if len(body) > (most := self._services.limits.max_body_bytes):
                raise body_too_large(most)
            if batch.endpoint == EMBEDDINGS:
                embeddings_request(parse(EmbeddingsBody, body), self._origin("", nobody))
            elif batch.endpoint == RESPONSES:
                parse(ResponsesBody, body)
            else:
                self._parsed(batch, body, self._origin("", nobody))
        except CALLER_ERRORS as error:
            public = public_error(error)
            param = f"body.{public.param}" if public.param else None
            return LineFault(public.code, public.message, None, param)
        return None

    async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
        own = f"{batch.batch_id.removeprefix('batch_')}_{line.number}"
        request_id = f"batch_req_{own}"
        try:
            caller = replace(self._services.keys.by_id(batch.key_id), own_salt=batch.own_salt)
            if caller.tenant != batch.tenant:
                raise InvalidKey("the key of the batch now belongs to another tenant")
            await self._services.limiter.enter(caller)
            answered = await self._answer(batch, body, self._origin(own, caller))
        except CALLER_ERRORS as error:
            answered = public_error(error)
        except Exception as defect:
            log_defect(defect, request_id)
            answered = public_error(defect)
        finally:
            bill = self._bills.take(f"gen_{own}")
        if isinstance(answered, PublicError):
            return self._failed(batch, request_id, answered)
        if isinstance(answered, bytes):
            return LineOutcome(200, answered, bill)
        return LineOutcome(200, answered[0], bill, answered[1])

    async def _answer(
        self, batch: BatchRow, body: bytes, origin: RequestOrigin
    ) -> bytes | tuple[bytes, StoredResponse | None] | PublicError:
        """The answer of a line; for a response, also what is to be stored together with the line's result."""
        services = self._services
        if batch.endpoint == EMBEDDINGS:
            given = parse(EmbeddingsBody, body)
            vectors = await in_time(services, services.embeddings.run(embeddings_request(given, origin)))
            return await vectors_body(vectors, given)
        if batch.endpoint == RESPONSES:
            own = await asked_of(services, parse(ResponsesBody, body), origin, len(body))
            answer = await self._generated(own)
            if isinstance(answer, PublicError):
                return answer
            response = whole_response(own, answer)
            row = await services.responses.to_keep(own, response) if own.store else None
            return orjson.dumps(response), row
        asked = self._parsed(batch, body, origin)
        answer = await self._generated(asked)
        if isinstance(answer, PublicError):
            return answer
        return self._dialects[batch.endpoint].whole(asked, answer)

    async def _generated(self, asked: ParsedRequest) -> Answer | PublicError:
        services, sink = self._services, WholeSink()
        deadline = services.clock() + services.limits.request_timeout_seconds
        # Lines with equal labels may run at the same time: `custom_id` tells them apart.
        request = structs.replace(asked.request, deadline=deadline, labelled=False)
        await run_journey(services, request, sink)
        assert sink.end is not None  # run_journey ends every sink
        return sink.end

    def _parsed(self, batch: BatchRow, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        asked = self._dialects[batch.endpoint].parse(body, origin)
        if asked.further:
            raise not_allowed("prompt", "is a list of several prompts", "one prompt a line")
        return asked

    def _origin(self, own: str, caller: Caller) -> RequestOrigin:
        services = self._services
        return RequestOrigin(
            request_id=f"batch_req_{own}",
            generation_id=f"gen_{own}",
            caller=caller,
            arrived_at=services.clock(),
            created=int(services.unix_time()),
            trace_id=(services.new_id("")[1:] * 2)[:32],
            allow_fallback=False,
            max_messages=services.limits.max_messages,
            is_auxiliary=True,
        )

    def _failed(self, batch: BatchRow, request_id: str, error: PublicError) -> LineOutcome:
        dialect = self._dialects.get(batch.endpoint)
        tell = error_json if dialect is None else dialect.error
        status, body = tell(error, request_id)
        outcome = LineOutcome(status, body, reason=error.message)
        kind = error.message.partition(":")[0]
        if kind in _ENGINE_DEATHS:
            return replace(outcome, engine_died=True)
        # A 429 without a time asks for more than is ever allowed.
        if (error.status == 429 and error.retry_after_ms is not None) or (
            error.status == 503 and (kind in _RETRYABLE or kind not in set(FailureKind))
        ):
            pause_s = PAUSE_S if error.retry_after_ms is None else error.retry_after_ms / 1000
            return replace(outcome, retry_s=pause_s)
        return replace(outcome, failed_here=error.status >= 500)
