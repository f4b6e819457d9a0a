"""``/v1/batches``: OpenAI's batches."""

from typing import Annotated

import orjson
from fastapi import Query, Response

from gateway.contracts.batches import BatchBody, BatchesBody, BatchObject
from gateway.errors import Forbidden
from gateway.http.exchange import Reply
from gateway.http.idempotency import CallerRequestDep
from gateway.http.respond import json_of, page_of, response_of
from gateway.http.routes import CallerRoute, CreationRoute, ExchangeDep, Json, callers_router

router = callers_router(CallerRoute, 400, 401, 403, 404, 409, 503, prefix="/v1/batches")
creation = callers_router(CreationRoute, 400, 401, 403, 404, 409, 413, 429, 503)


@creation.post("/v1/batches", response_model=BatchObject)
async def create_batch(given: Json[BatchBody], call: CallerRequestDep) -> Response:
    """Begin a batch; its file is checked first."""
    services, caller = call.exchange.services, call.exchange.known_caller
    if caller.by_front:
        raise Forbidden("a key of role 'front' may not use batches: a front runs those of its tenants itself")

    async def run() -> Reply:
        made = await services.batches.create(caller, services.new_id("batch"), given)
        return Reply(200, orjson.dumps(made))

    return response_of(await call.once(run))


@router.get("", response_model=BatchesBody)
async def list_batches(
    exchange: ExchangeDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> Response:
    """The tenant's batches, newest first."""
    found = await exchange.services.batches.page(exchange.tenant, after=after, limit=limit + 1)
    return page_of(found, limit)


@router.get("/{batch_id}", response_model=BatchObject)
async def show_batch(batch_id: str, exchange: ExchangeDep) -> Response:
    """A batch."""
    return json_of(await exchange.services.batches.show(exchange.tenant, batch_id))


@router.post("/{batch_id}/cancel", response_model=BatchObject)
async def cancel_batch(batch_id: str, exchange: ExchangeDep) -> Response:
    """Cancel a batch: no further line starts; the result files contain the lines that have ended."""
    return json_of(await exchange.services.batches.cancel(exchange.tenant, batch_id))
