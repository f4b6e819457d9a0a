"""The endpoint of all HTTP paths that generate; its dialect determines the public contract."""

import asyncio
import re
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.contracts.answer import Answer
from gateway.contracts.dialect import ContractDialect, Frames, ParsedRequest
from gateway.contracts.fields import label_or_none
from gateway.contracts.images import LONG_BYTES, parse_around_images
from gateway.contracts.origin import EdgeRequest, RequestOrigin
from gateway.contracts.values import GenerateRequest
from gateway.errors import DeadlineExceeded, Internal, PublicError, RateLimited, public_error
from gateway.generation.sink import Accept, Sink, nothing
from gateway.http.authorize import caller_of
from gateway.http.body import read_body
from gateway.http.disconnect_watch import Release, until_gone
from gateway.http.exchange import Exchange, Reply
from gateway.http.fan_out import run_prompts
from gateway.http.idempotency import Idempotency, fingerprint_of, sent_key
from gateway.http.respond import error_reply, log_defect
from gateway.http.sinks import StreamSink, WholeSink
from gateway.ports import Services
from resilience.time_limits import TimeLimit

T = TypeVar("T")
NOT_GENERATED: Final = frozenset({"degraded", "response_cache"})
"""Values of ``backend`` without a model: such an answer costs nothing and is not stored under a key."""

# Finds ``sluice-no-fallback`` among the preferences of a header ``Prefer``.
_no_fallback = re.compile(rb"(?:^|,)\s*sluice-no-fallback\s*(?:[,;]|\Z)", re.IGNORECASE).search

OVERTIME_S: Final = 0.5
"""Time after its own limit until a journey is cancelled, so that it can answer by itself before."""


class EndingSink(Sink, Protocol):
    """A sink that knows whether the journey has ended."""

    @property
    def ended(self) -> bool:
        """Whether ``finish`` or ``fail`` was called."""


async def run_journey(
    services: Services,
    request: GenerateRequest,
    sink: EndingSink,
    further: Sequence[GenerateRequest] = (),
    exchange: Exchange | None = None,
    accept: Accept = nothing,
) -> None:
    """Run the journey; the sink always gets an end. ``further``: the requests of the body's other prompts.
    ``accept`` is for a request without further ones.

    The journey ends by itself within its time limit and reports its failures to the sink. This function
    reports what the journey cannot: its cancellation after the time limit, or a defect of it. The journey
    reports the ``exchange``; the edge does if the key's limits do not let the journey begin, and this
    function for a request without one.
    """
    limit_s = services.limits.request_timeout_seconds
    error: PublicError | None = None
    try:
        with (
            services.limiter.running(request.caller),
            TimeLimit(services.time_limits, limit_s + OVERTIME_S) as bound,
        ):
            if exchange is not None:
                exchange.reported = True
            if further:
                await run_prompts(services.journey.run, (request, *further), sink, services.clock)
            else:
                await services.journey.run(request, sink, accept)
    except RateLimited as refused:
        error = public_error(refused)
        if exchange is not None:
            exchange.status, exchange.error = error.status, error
        else:
            services.emit_edge(_refused(request, error))
    except Exception as defect:
        if isinstance(defect, TimeoutError) and bound.expired:
            error = public_error(DeadlineExceeded(f"the request took longer than {limit_s:g} s"))
        else:
            log_defect(defect, request.request_id)
            error = request.in_body_terms(public_error(defect))
    if not sink.ended:
        await sink.fail(error or public_error(Internal("the request ended without an answer")))


def _refused(request: GenerateRequest, error: PublicError) -> EdgeRequest:
    """The report of a request that runs without a connection, and that the key's limits refused."""
    return EdgeRequest(
        request_id=request.request_id,
        trace_id=request.trace_id or "",
        arrived_at=request.arrived_at,
        method="POST",
        trace_parent=request.trace_parent,
        trace_state=request.trace_state,
        contract=request.contract.value,
        caller=request.caller,
        status=error.status,
        error=error,
    )


async def in_time(services: Services, work: Awaitable[T]) -> T:
    """Await ``work`` within the time limit of a request. Raises DeadlineExceeded."""
    limit_s = services.limits.request_timeout_seconds
    try:
        with TimeLimit(services.time_limits, limit_s):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"the request took longer than {limit_s:g} s") from None


def origin_of(exchange: Exchange) -> RequestOrigin:
    """What the edge knows of a generation besides its body."""
    headers, services = exchange.headers, exchange.services
    session = headers.get(b"x-claude-code-session-id")
    return RequestOrigin(
        request_id=exchange.request_id,
        generation_id=services.new_id("gen"),
        caller=exchange.known_caller,
        arrived_at=exchange.arrived_at,
        created=int(services.unix_time()),
        trace_id=exchange.trace_id,
        trace_parent=exchange.trace_parent,
        trace_state=exchange.trace_state,
        allow_fallback=not _no_fallback(headers.get(b"prefer", b"")),
        max_messages=services.limits.max_messages,
        session_id=None if session is None else label_or_none(session.decode("latin-1").strip()),
        is_auxiliary=headers.get(b"x-claude-code-request-class", b"").strip().lower() == b"auxiliary",
    )


class GenerationEndpoint:
    """A plain ASGI app: authenticates, reads and parses a request, then runs its journey into a sink.

    ``Idempotency-Key`` is supported for whole answers and has no effect on streams.
    """

    def __init__(self, services: Services, dialect: ContractDialect, idempotency: Idempotency) -> None:
        self._services = services
        self._dialect = dialect
        self._idempotency = idempotency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer through the exchange, not through ``send``; the middleware answers errors."""
        exchange = Exchange.of(scope)
        services = self._services
        caller = caller_of(exchange)
        await services.limiter.enter(caller)
        body = await read_body(exchange, receive, services.limits.max_body_bytes)
        if len(body) > LONG_BYTES:  # it may contain long images
            asked = await parse_around_images(body, partial(self._asked, exchange, body))
        else:
            asked = await self._asked(exchange, body, body)
        exchange.request_id = asked.request.request_id
        key = None if asked.request.stream else sent_key(exchange)
        content = "" if key is None else fingerprint_of(scope["path"], body, caller)
        del body  # frees its memory; the request has its content
        async with until_gone(exchange, receive) as release:
            if asked.request.stream:
                await self._stream(exchange, asked)
            elif key is None:
                await self._whole(exchange, asked, release)
            else:
                once = self._idempotency.answer(
                    exchange,
                    key,
                    content,
                    lambda: self._collected(exchange, asked, release),
                    lambda: services.may_use(asked.request),
                )
                await exchange.reply(await once)

    async def _asked(self, exchange: Exchange, body: bytes, short: bytes) -> ParsedRequest:
        """The request in ``short``, which is the body or has marks in place of the body's long images."""
        return self._dialect.parse(short, origin_of(exchange))

    async def _keep(self, asked: ParsedRequest, frames: Frames, answer: Answer) -> None:
        """Store a streamed answer before its end is sent, if its contract stores answers."""

    async def _body(self, asked: ParsedRequest, answer: Answer) -> bytes:
        return self._dialect.whole(asked, answer)

    def _stream(self, exchange: Exchange, asked: ParsedRequest) -> Awaitable[None]:
        # No coroutine of its own: it would be one more frame to resume at every wait of a request.
        sink = StreamSink(exchange, self._dialect, asked, self._keep)
        journey = run_journey(self._services, asked.request, sink, asked.further, exchange)
        return _with_pings(sink, journey) if sink.pings else journey

    def _whole(self, exchange: Exchange, asked: ParsedRequest, release: Release) -> Awaitable[None]:
        """Run the journey; the answer is sent as soon as it may be, before the request's record is made."""

        async def send(end: Answer | PublicError) -> None:
            release()
            reply = await self._reply(exchange, asked, end)
            if not exchange.started:
                await exchange.reply(reply)

        return run_journey(self._services, asked.request, WholeSink(send), asked.further, exchange)

    async def _collected(self, exchange: Exchange, asked: ParsedRequest, release: Release) -> Reply:
        """Run the journey; the answer is stored under its key before it is sent."""
        sink = WholeSink()
        await run_journey(self._services, asked.request, sink, asked.further, exchange)
        release()
        assert sink.end is not None  # run_journey ends every sink
        return await self._reply(exchange, asked, sink.end)

    async def _reply(self, exchange: Exchange, asked: ParsedRequest, end: Answer | PublicError) -> Reply:
        if isinstance(end, PublicError):
            return error_reply(end, exchange.request_id, self._dialect.error)
        exchange.trace_id = end.trace_id or exchange.trace_id
        body, headers = await self._body(asked, end), tuple(self._dialect.headers(end.budget))
        return Reply(200, body, headers=headers, keep=end.backend not in NOT_GENERATED)


async def _with_pings(sink: StreamSink, journey: Awaitable[None]) -> None:
    async with asyncio.TaskGroup() as group:
        keeping_alive = group.create_task(sink.keep_alive())
        await journey
        keeping_alive.cancel()
