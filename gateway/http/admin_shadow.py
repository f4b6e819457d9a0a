"""``GET /admin/shadow``: how shadowed requests compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import parse_qs

import orjson
from starlette.types import Receive, Scope

from gateway.admin.ports import ShadowService
from gateway.contracts.native_answer import error_json
from gateway.contracts.values import CallerRole
from gateway.errors import InvalidRequest
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services

DEFAULT_PAIRS = 1_000
# About 8 s of a thread.
MAX_PAIRS = 10_000


def shadow_page(services: Services, shadow: ShadowService) -> Endpoint:
    """The page; for operators and admins. Query: ``limit``, ``route``, ``since`` (Unix seconds)."""

    async def show(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
        require_role(services, exchange, CallerRole.OPERATOR)
        found = parse_qs(scope["query_string"].decode("latin-1"))
        query = {name: values[-1] for name, values in found.items()}
        asked = shadow.report(limit=_limit(query), route=query.get("route"), since=_since(query))
        return Reply(200, orjson.dumps(await run_until_gone(asked, exchange, receive, services.clock)))

    return Endpoint(show, error_json)


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(DEFAULT_PAIRS))
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= MAX_PAIRS):
        raise InvalidRequest(f"limit: allowed: a whole number from 1 to {MAX_PAIRS}", param="limit")
    return int(given)


def _since(query: Mapping[str, str]) -> float | None:
    if "since" not in query:
        return None
    try:
        since = float(query["since"])
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise InvalidRequest("since: allowed: seconds since 1970", param="since")
    return since
