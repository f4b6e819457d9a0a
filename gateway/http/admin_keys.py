"""``/admin/keys``: callers' and operators' keys, for admins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import orjson
from pydantic import AwareDatetime, Field
from starlette.types import Receive, Scope

from accounting.keys import KeyLimits
from gateway.admin.ports import KeyOrder, KeyService
from gateway.contracts.fields import Body, Priority
from gateway.contracts.native_answer import error_json
from gateway.contracts.refusals import parse
from gateway.contracts.values import CallerRole
from gateway.http.body import read_body
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services

_Limit = Annotated[int, Field(ge=1, le=10**15)]
# Tenants and organizations are labels in metrics and reports, so each is one printable word.
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,127}$")]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
# An empty list would be a key for nothing; "all" is said by leaving the field out.
_Names = Annotated[list[_Name], Field(min_length=1, max_length=256)]


class KeyLimitsBody(Body):
    """How much the key may ask for."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    tokens_per_day: _Limit | None = None


class KeyBody(Body):
    """A new key."""

    tenant: _Word
    org: _Word | None = None
    role: CallerRole = CallerRole.CALLER
    # High priority is granted, not found.
    max_priority: Priority = 0
    routes: _Names | None = None
    adapters: _Names | None = None
    limits: KeyLimitsBody = KeyLimitsBody()
    # A time as text, or seconds since 1970.
    expires_at: Annotated[AwareDatetime, Field(strict=False)] | None = None
    comment: Annotated[str, Field(max_length=1_000)] = ""

    def order(self) -> KeyOrder:
        """The same for the desk."""
        return KeyOrder(
            tenant=self.tenant,
            role=self.role,
            max_priority=self.max_priority,
            routes=None if self.routes is None else tuple(self.routes),
            adapters=None if self.adapters is None else tuple(self.adapters),
            requests_per_minute=self.limits.requests_per_minute,
            tokens_per_minute=self.limits.tokens_per_minute,
            tokens_per_day=self.limits.tokens_per_day,
            expires_at=None if self.expires_at is None else self.expires_at.timestamp(),
            comment=self.comment,
            org=self.org,
        )


def key_list(services: Services, keys: KeyService) -> Endpoint:
    """GET of ``/admin/keys``."""

    async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.ADMIN)
        found = cast("Sequence[Mapping[str, Any]]", keys.show_all()["keys"])
        return Reply(200, orjson.dumps({"keys": [await _with_use(services, one) for one in found]}))

    return Endpoint(handle, error_json)


async def _with_use(services: Services, key: Mapping[str, Any]) -> Mapping[str, Any]:
    """A look at the store for each limited key: 100 of them are some 30 ms."""
    return {**key, "used": await services.limiter.used(key["id"], KeyLimits(**key.get("limits", {})))}


def key_maker(services: Services, keys: KeyService) -> Endpoint:
    """POST of ``/admin/keys``."""

    async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = require_role(services, exchange, CallerRole.ADMIN)
        given = parse(KeyBody, await read_body(exchange, receive, services.limits.max_body_bytes))
        made = await keys.create(given.order(), who=caller.key_id)
        return Reply(201, orjson.dumps(made))

    return Endpoint(handle, error_json)


def key_revoker(services: Services, keys: KeyService) -> Endpoint:
    """DELETE of ``/admin/keys/{id}``."""

    async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        caller = require_role(services, exchange, CallerRole.ADMIN)
        await keys.revoke(scope["path_params"]["id"], who=caller.key_id)
        return Reply(204, b"")

    return Endpoint(handle, error_json)
