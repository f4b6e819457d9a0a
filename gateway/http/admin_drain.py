"""``POST /admin/drain``: this process leaves service; for operators."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope

from gateway.admin.ports import DrainService
from gateway.contracts.native_answer import error_json
from gateway.contracts.values import CallerRole
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services


def drainer(services: Services, drain: DrainService) -> Endpoint:
    """What POST answers; its body is not looked at."""

    async def begin(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, orjson.dumps(await drain.begin(caller.key_id)))

    return Endpoint(begin, error_json)
