"""``/v1/responses``: the endpoint that generates a response, and the routes for stored ones."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import orjson
from fastapi import Depends, Query, Response
from msgspec import structs
from starlette.responses import StreamingResponse

from accounting.errors import LedgerUnavailable
from accounting.stored_responses import UNFINISHED, StoredResponse
from gateway.contracts.answer import Answer
from gateway.contracts.dialect import Frames, ParsedRequest
from gateway.contracts.openai_answer import DeletedBody, PageBody
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed, parse
from gateway.contracts.responses.answer import ResponseBody, sealed_items
from gateway.contracts.responses.body import CompactBody, Includable, ResponsesBody
from gateway.contracts.responses.compact import compacted, summary_body
from gateway.contracts.responses.conversation import stored_item
from gateway.contracts.responses.request import INCLUDED_SEALED, ResponsesRequest, responses_request
from gateway.contracts.responses.stream import ResponseFrames, ResponsesDialect, whole_response
from gateway.errors import InvalidKey, NotFound
from gateway.http.disconnect_watch import Release
from gateway.http.exchange import Exchange, Reply
from gateway.http.generate import GenerationEndpoint, origin_of, run_journey
from gateway.http.idempotency import Idempotency
from gateway.http.respond import CALLER_ERRORS, json_of, log_defect, page_of
from gateway.http.routes import CallerRoute, ExchangeDep, callers_router
from gateway.http.sinks import STREAM_HEADERS
from gateway.ports import Services
from gateway.requests.background import number_of, split
from gateway.requests.stored_responses import events_of, response_of

PATH: Final = "/v1/responses"
COMPACT: Final = f"{PATH}/compact"
LOOK_S: Final = 1.0  # pause between two checks of a response that runs on another gateway


class ResponsesEndpoint(GenerationEndpoint):
    """Stores each response before its end is sent, and continues stored conversations."""

    def __init__(self, services: Services, idempotency: Idempotency) -> None:
        super().__init__(services, ResponsesDialect(), idempotency)

    async def _asked(self, exchange: Exchange, body: bytes, short: bytes) -> ParsedRequest:
        origin = origin_of(exchange)
        own = await asked_of(self._services, parse(ResponsesBody, short), origin, len(short))
        # A streaming client has events that a new run would not repeat; a front's tenant is not the key's.
        if own.background and not own.request.stream and not own.request.caller.by_front:
            own = structs.replace(own, again=await asyncio.to_thread(_packed, origin, body))
        return own

    async def _stream(self, exchange: Exchange, asked: ParsedRequest) -> None:
        own = cast("ResponsesRequest", asked)
        if not own.background:
            await super()._stream(exchange, asked)
            return
        run = await self._services.background.start(own, partial(_run, self._services))
        exchange.reported = True
        if run.refusal is not None:
            await exchange.reply(await self._reply(exchange, asked, run.refusal))
            return
        await exchange.start(200, STREAM_HEADERS)
        async for event in run.follow(-1):
            await exchange.body(event, more=True)
        await exchange.body(b"", more=False)

    async def _whole(self, exchange: Exchange, asked: ParsedRequest, release: Release) -> None:
        if cast("ResponsesRequest", asked).background:
            await exchange.reply(await self._collected(exchange, asked, release))
        else:
            await super()._whole(exchange, asked, release)

    async def _collected(self, exchange: Exchange, asked: ParsedRequest, release: Release) -> Reply:
        own = cast("ResponsesRequest", asked)
        if not own.background:
            return await super()._collected(exchange, asked, release)
        run = await self._services.background.start(own, partial(_run, self._services))
        exchange.reported = True
        if run.refusal is not None:
            return await self._reply(exchange, asked, run.refusal)
        return Reply(200, orjson.dumps(run.queued))

    async def _keep(self, asked: ParsedRequest, frames: Frames, answer: Answer) -> None:
        own = cast("ResponsesRequest", asked)
        if own.store:
            response = cast("ResponseFrames", frames).ending(answer)
            await self._services.responses.keep(own, response)

    async def _body(self, asked: ParsedRequest, answer: Answer) -> bytes:
        """Store the response if requested, and return it as JSON."""
        own = cast("ResponsesRequest", asked)
        response = whole_response(own, answer)
        if own.store:
            await self._services.responses.keep(own, response)
        return orjson.dumps(response)


class CompactEndpoint(ResponsesEndpoint):
    """Answers with a conversation's summary by the model, in the form of an item for later requests."""

    async def _asked(self, exchange: Exchange, body: bytes, short: bytes) -> ParsedRequest:
        summary = summary_body(parse(CompactBody, short))
        return await asked_of(self._services, summary, origin_of(exchange))

    async def _body(self, asked: ParsedRequest, answer: Answer) -> bytes:
        return orjson.dumps(compacted(cast("ResponsesRequest", asked), answer))


async def asked_of(
    services: Services, body: ResponsesBody, origin: RequestOrigin, size: int = 0
) -> ResponsesRequest:
    """The request with the stored conversation before it; stored items replace references to them.

    ``size``: the bytes of the body. Raises NotFound, InvalidRequest.
    """
    body = await _with_items(services, body, origin.caller.tenant)
    before = await services.responses.before(
        origin.caller.tenant, body.previous_response_id, services.limits.max_body_bytes
    )
    return responses_request(
        body, origin, stores=services.responses.enabled, before=before, seal=services.seal, size=size
    )


async def _with_items(services: Services, body: ResponsesBody, tenant: str) -> ResponsesBody:
    given = () if isinstance(body.input, str) else body.input
    named = {one.referenced: f"input.{at}.id" for at, one in enumerate(given) if one.referenced is not None}
    if not named:
        return body
    if "" in named:
        raise not_allowed(named[""], "is missing or no text", "the id of an item of a stored response")
    items = await services.responses.referenced(tenant, named, services.limits.max_body_bytes)
    stored = {one["id"]: stored_item(one, named[one["id"]]) for one in items}
    return body.model_copy(
        update={"input": [one if one.referenced is None else stored[one.referenced] for one in given]}
    )


async def _run(services: Services, asked: ResponsesRequest, sink: Any) -> None:
    # The answer is streamed even if no client follows it now: one may follow it later.
    await run_journey(services, structs.replace(asked.request, stream=True), sink, accept=sink.accepted.set)


class _Again(msgspec.Struct, frozen=True):
    """The data with which another gateway runs a background request again; ``origin`` has ``_OF_ORIGIN``."""

    body: bytes
    key_id: str
    own_salt: str | None
    origin: dict[str, Any]


_OF_ORIGIN: Final = (
    "request_id", "trace_id", "created", "allow_fallback", "session_id", "is_auxiliary",
)  # fmt: skip


def _packed(origin: RequestOrigin, body: bytes) -> bytes:
    kept = {name: getattr(origin, name) for name in _OF_ORIGIN}
    again = _Again(body, origin.caller.key_id, origin.caller.own_salt, kept)
    return zlib.compress(msgspec.msgpack.encode(again), 1)


class ResponsesRerun:
    """Runs background responses of gateways that died: once more, from the beginning."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def ready(self) -> bool:
        return self._services.health.ready()[0]

    async def asked(self, row: StoredResponse) -> ResponsesRequest:
        """Rebuild the request. Raises InvalidKey, and the errors that refuse a new request."""
        services = self._services
        try:
            again = msgspec.msgpack.decode(zlib.decompress(row.again or b""), type=_Again)
            caller = replace(services.keys.by_id(again.key_id), own_salt=again.own_salt)
            if caller.tenant != row.tenant:
                raise InvalidKey("the key of the request now belongs to another tenant")
            origin = RequestOrigin(
                generation_id=f"gen_{row.response_id.removeprefix('resp_')}",
                caller=caller,
                arrived_at=services.clock(),
                max_messages=services.limits.max_messages,
                **again.origin,
            )
            return await asked_of(services, parse(ResponsesBody, again.body), origin)
        except Exception as error:
            if not isinstance(error, CALLER_ERRORS):
                log_defect(error, row.response_id)
            raise

    async def run(self, asked: ResponsesRequest, sink: Any) -> None:
        """Run the request under a new ledger id, since the first run may have a ledger row already."""
        request = structs.replace(asked.request, generation_id=self._services.new_id("gen"), stream=True)
        await run_journey(self._services, request, sink)


class InputItemsBody(PageBody):
    """A page of input items."""

    data: list[dict[str, Any]]


MAX_NUMBER: Final = 2**53 - 1
"""The largest integer that all clients read from JSON; more than any stream's events."""

router = callers_router(CallerRoute, 400, 401, 404, 503, prefix=PATH)


async def _seals(
    include: Annotated[list[Includable], Query(default_factory=list)],
    bracketed: Annotated[list[Includable], Query(default_factory=list, alias="include[]")],
) -> bool:
    """Whether ``include``, which the official client writes ``include[]``, asks for sealed reasoning.

    What the other values name is in the items anyway, if it was stored.
    """
    return INCLUDED_SEALED in (*include, *bracketed)


Seals = Annotated[bool, Depends(_seals)]


@router.get("/{response_id}", response_model=ResponseBody)
async def show_response(
    response_id: str,
    exchange: ExchangeDep,
    seals: Seals,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, le=MAX_NUMBER)] = -1,
    include_obfuscation: bool = False,
) -> Response:
    """A stored response; with ``stream``, a background response's events after ``starting_after``.

    Events are those that were made when the response was; none are obfuscated.
    """
    services, tenant = exchange.services, exchange.tenant
    row = await services.responses.get(tenant, response_id)
    response, run = response_of(row), services.background.of(tenant, response_id)
    if not stream:
        running = run is not None and row.status in UNFINISHED
        shown = run.state() if run is not None and running else response
        if seals:
            shown["output"] = _sealed(exchange, shown["model"], shown["output"])
        return json_of(shown)
    if not response["background"]:
        raise not_allowed("stream", "is true", "false for a response that was not created in the background")
    if run is None and row.events is not None and not row.open(services.responses.now()):
        last = number_of(split(events_of(row, starting_after))[-1])
        if starting_after > last:
            raise not_allowed("starting_after", f"is {starting_after}", f"{last}, the last event, or less")
    if run is not None and not run.ended:
        await services.background.show(run)
    follow = _stored(exchange, response_id, starting_after) if run is None else run.follow(starting_after)
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    return StreamingResponse(follow, headers=headers)


@router.delete("/{response_id}", response_model=DeletedBody)
async def delete_response(response_id: str, exchange: ExchangeDep) -> DeletedBody:
    """Delete a stored response; if it still runs, it is cancelled."""
    await exchange.services.responses.delete(exchange.tenant, response_id)
    running = exchange.services.background.of(exchange.tenant, response_id)
    if running is not None:
        running.cancel()  # another gateway finds out with its next heartbeat
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel", response_model=ResponseBody)
async def cancel_response(response_id: str, exchange: ExchangeDep) -> Response:
    """Cancel a background response; one that has ended is returned unchanged."""
    row = await exchange.services.responses.get(exchange.tenant, response_id)
    if not response_of(row)["background"]:
        raise not_allowed("response_id", "was not created in the background", "a background response")
    if row.status not in UNFINISHED:
        return json_of(response_of(row))
    return json_of(await exchange.services.background.cancel(row))


@router.get("/{response_id}/input_items", response_model=InputItemsBody)
async def list_input_items(
    response_id: str,
    exchange: ExchangeDep,
    seals: Seals,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The model's input: the conversation before the response, and the response's own input."""
    services, tenant = exchange.services, exchange.tenant
    items = await services.responses.input_items(tenant, response_id, services.limits.max_body_bytes)
    # An item that a client sent in several turns is listed once: `after` names it by its id.
    items = list({item["id"]: item for item in items}.values())
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise not_allowed("after", "is not an item of the response", "an id from the previous page")
        items = items[ids.index(after) + 1 :]
    if seals:
        row = await services.responses.get(tenant, response_id)
        items = _sealed(exchange, response_of(row)["model"], items)
    return page_of(items, limit)


def _sealed(exchange: Exchange, model: str, items: list[Any]) -> list[Any]:
    seal = exchange.services.seal
    return items if seal is None else sealed_items(items, partial(seal.seal, exchange.tenant, model))


async def _stored(exchange: Exchange, response_id: str, after: int) -> AsyncIterator[bytes]:
    """The events after this number of a response that runs on another gateway, once it has ended.

    There are none if it is deleted meanwhile; a database that is away is waited for.
    """
    responses = exchange.services.responses
    while True:
        with suppress(LedgerUnavailable):
            try:
                row = await responses.get(exchange.tenant, response_id)
            except NotFound:
                return
            if not row.open(responses.now()):
                break
        await asyncio.sleep(LOOK_S)
    for event in split(events_of(row, after)):
        if number_of(event) > after:
            yield event
