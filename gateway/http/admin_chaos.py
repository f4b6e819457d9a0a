"""``/admin/chaos``: the faults made on purpose. The path exists only while ``chaos.enabled`` is true."""

from __future__ import annotations

from typing import Annotated

import orjson
from pydantic import Field
from starlette.types import Receive, Scope

from gateway.admin.ports import ChaosService
from gateway.config.chaos import MAX_RULES, FaultRule
from gateway.config.section import Section
from gateway.contracts.native_answer import error_json
from gateway.contracts.refusals import parse
from gateway.contracts.values import CallerRole
from gateway.http.body import read_body
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services


class FaultsRequest(Section):
    """The rules that shall be in force; none ends all faults."""

    faults: Annotated[tuple[FaultRule, ...], Field(max_length=MAX_RULES)]


def chaos_pages(services: Services, chaos: ChaosService) -> tuple[Endpoint, Endpoint]:
    """What GET and what POST answers; for admins."""

    async def show(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.ADMIN)
        return Reply(200, orjson.dumps(chaos.show()))

    async def replace(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = require_role(services, exchange, CallerRole.ADMIN)
        body = await read_body(exchange, receive, services.limits.max_body_bytes)
        shown = await chaos.replace(parse(FaultsRequest, body).faults, who=caller.key_id)
        return Reply(200, orjson.dumps(shown))

    return Endpoint(show, error_json), Endpoint(replace, error_json)
