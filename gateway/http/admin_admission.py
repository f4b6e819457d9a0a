"""``GET /admin/admission``: how each gate stands, the limits in force, the last decisions."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope

from gateway.contracts.native_answer import error_json
from gateway.contracts.values import CallerRole
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services


def admission_pages(services: Services) -> dict[str, Endpoint]:
    """What is read with GET, by path; for operators and admins."""

    async def show(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        return Reply(200, orjson.dumps(services.admission.show()))

    return {"/admin/admission": Endpoint(show, error_json)}
