"""``/admin/routing`` and ``/admin/audit``: routing revisions, and what operators did; for operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qs

import orjson
from pydantic import Field
from starlette.types import Receive, Scope

from gateway.admin.ports import RoutingOrder, RoutingService
from gateway.contracts.fields import Body
from gateway.contracts.native_answer import error_json
from gateway.contracts.refusals import parse
from gateway.contracts.values import CallerRole
from gateway.errors import InvalidRequest
from gateway.http.body import read_body
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 1_000


class _Order(Body):
    """What every change says."""

    comment: Annotated[str, Field(max_length=1_000)] = ""
    expected_revision: Annotated[int, Field(ge=0)] | None = None
    dry_run: bool = False

    def order(self, who: str) -> RoutingOrder:
        """The same for the desk."""
        return RoutingOrder(who, self.comment, self.expected_revision, self.dry_run)


class RouteApplyBody(_Order):
    """A whole configuration; validated as a routing file is."""

    config: dict[str, Any]


class RoutePromoteBody(_Order):
    """The backend that shall have the whole route."""

    route: str
    backend: str


class RouteWeightBody(RoutePromoteBody):
    """The share that a backend shall have."""

    percent: Annotated[float, Field(ge=0, le=100)]


class RouteRollbackBody(_Order):
    """The revision to go back to; unset: the last one of another content."""

    to: Annotated[int, Field(ge=1)] | None = None


B = TypeVar("B", bound=_Order)
Answer = Mapping[str, object]


def routing_pages(services: Services, routing: RoutingService) -> dict[str, Endpoint]:
    """What is read with GET, by path."""

    def get(answer: Callable[[Mapping[str, str]], Awaitable[Answer]]) -> Endpoint:
        async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
            require_role(services, exchange, CallerRole.OPERATOR)
            found = answer(_query(scope))
            return Reply(200, orjson.dumps(await run_until_gone(found, exchange, receive, services.clock)))

        return Endpoint(handle, error_json)

    async def show(_: Mapping[str, str]) -> Answer:
        return routing.show()

    async def history(query: Mapping[str, str]) -> Answer:
        return {"revisions": await routing.history(_limit(query))}

    async def diff(query: Mapping[str, str]) -> Answer:
        return {"changes": await routing.diff(_number(query, "a"), _number(query, "b"))}

    async def audit(query: Mapping[str, str]) -> Answer:
        return {"entries": await routing.audit(_limit(query))}

    return {
        "/admin/routing": get(show),
        "/admin/routing/history": get(history),
        "/admin/routing/diff": get(diff),
        "/admin/audit": get(audit),
    }


def routing_changes(services: Services, routing: RoutingService) -> tuple[Endpoint, dict[str, Endpoint]]:
    """What PUT of ``/admin/routing`` answers, and what is posted, by path."""

    def change(body: type[B], make: Callable[[B, RoutingOrder], Awaitable[Answer]]) -> Endpoint:
        async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
            caller = require_role(services, exchange, CallerRole.OPERATOR)
            raw = await read_body(exchange, receive, services.limits.max_body_bytes)
            given = parse(body, raw or b"{}")
            # Not until the caller is gone: a change that was begun is audited too. It is short and bounded.
            return Reply(200, orjson.dumps(await make(given, given.order(caller.key_id))))

        return Endpoint(handle, error_json)

    put = change(RouteApplyBody, lambda given, order: routing.apply(given.config, order))
    return put, {
        "/admin/routing/weights": change(
            RouteWeightBody,
            lambda given, order: routing.set_weight(given.route, given.backend, given.percent, order),
        ),
        "/admin/routing/promote": change(
            RoutePromoteBody, lambda given, order: routing.promote(given.route, given.backend, order)
        ),
        "/admin/routing/rollback": change(
            RouteRollbackBody, lambda given, order: routing.roll_back(given.to, order)
        ),
    }


def _query(scope: Scope) -> Mapping[str, str]:
    """The query's parameters; of a repeated one the last."""
    found = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return {name: values[-1] for name, values in found.items()}


def _limit(query: Mapping[str, str]) -> int:
    return _number(query, "limit", DEFAULT_LIMIT, MAX_LIMIT)


def _number(query: Mapping[str, str], name: str, default: int | None = None, most: int = 10**9) -> int:
    """Raises InvalidRequest unless it is 1 to ``most``."""
    given = query.get(name)
    if given is None and default is not None:
        return default
    if given is None:
        raise InvalidRequest(f"{name} is missing; it is required", param=name)
    if not (given.isascii() and given.isdigit() and len(given) <= 10 and 1 <= int(given) <= most):
        raise InvalidRequest(
            f"{name} is a string of {len(given)} characters; allowed: a whole number from 1 to {most}",
            param=name,
        )
    return int(given)
