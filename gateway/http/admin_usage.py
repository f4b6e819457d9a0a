"""``/admin/usage``: what was used and what it cost, for operators."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final, get_args
from urllib.parse import parse_qs

import orjson
from starlette.types import Receive, Scope

from accounting.reports import DIMENSIONS, MAX_PAGE, Page, Span, UsageReport
from accounting.values import Kind
from gateway.admin.ports import UsageService
from gateway.contracts.native_answer import error_json
from gateway.contracts.values import CallerRole
from gateway.errors import InvalidRequest
from gateway.http.disconnect_watch import run_until_gone
from gateway.http.endpoint import Endpoint, require_role
from gateway.http.exchange import Exchange, Reply
from gateway.ports import Services

_KNOWN: Final = frozenset({"by", "since", "until", "kind", "after", "limit"})
_TIMES: Final = "an ISO 8601 time with an offset, a day as 2026-11-22 (UTC), or seconds since 1970"
# The year 3000: beyond it no row starts, and dates end.
_LAST_S: Final = 32_503_680_000.0

Query = Mapping[str, str]


def usage_pages(services: Services, usage: UsageService) -> dict[str, Endpoint]:
    """What is read with GET, by path."""

    def page(answer: Callable[[Query], Awaitable[Mapping[str, object]]]) -> Endpoint:
        async def handle(exchange: Exchange, scope: Scope, receive: Receive) -> Reply:
            require_role(services, exchange, CallerRole.OPERATOR)
            found = answer(_query(scope))
            return Reply(200, orjson.dumps(await run_until_gone(found, exchange, receive, services.clock)))

        return Endpoint(handle, error_json)

    async def report(query: Query) -> Mapping[str, object]:
        return await usage.report(UsageReport(_by(query), _span(query), _kind(query)))

    async def rows(query: Query) -> Mapping[str, object]:
        return await usage.rows(Page(_span(query), _limit(query), _after(query)))

    async def reconcile(query: Query) -> Mapping[str, object]:
        return await usage.reconcile(_span(query))

    return {
        "/admin/usage": page(report),
        "/admin/usage/rows": page(rows),
        "/admin/usage/reconcile": page(reconcile),
    }


def _query(scope: Scope) -> Query:
    found = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    unknown = sorted(found.keys() - _KNOWN)
    if unknown:
        raise InvalidRequest(
            f"{unknown[0]!r:.80} is no parameter here; allowed: {', '.join(sorted(_KNOWN))}", param="query"
        )
    return {name: values[-1] for name, values in found.items()}


def _by(query: Query) -> tuple[str, ...]:
    named = tuple(dict.fromkeys(one.strip() for one in query.get("by", "tenant").split(",") if one.strip()))
    for one in named:
        if one not in DIMENSIONS:
            raise InvalidRequest(
                f"by names {one!r:.80}; allowed: {', '.join(DIMENSIONS)}, with commas between", param="by"
            )
    return named


def _kind(query: Query) -> Kind:
    given = query.get("kind", "request")
    for kind in get_args(Kind):
        if given == kind:
            return kind  # type: ignore[no-any-return]
    raise InvalidRequest(f"kind is {given!r:.80}; allowed: {', '.join(get_args(Kind))}", param="kind")


def _span(query: Query) -> Span:
    span = Span(_time(query, "since"), _time(query, "until"))
    if span.since is not None and span.until is not None and span.since >= span.until:
        raise InvalidRequest("until is not later than since; allowed: later", param="until")
    return span


def _time(query: Query, name: str) -> float | None:
    given = query.get(name)
    if given is None:
        return None
    found = _seconds(given.strip())
    if found is None or not 0 <= found <= _LAST_S:
        raise InvalidRequest(f"{name} is {given!r:.80}; allowed: {_TIMES}", param=name)
    return found


def _seconds(given: str) -> float | None:
    try:
        return float(given)
    except ValueError:
        pass
    try:
        # A plus sign that was not escaped in the query came as a space.
        moment = datetime.fromisoformat(given.replace(" ", "+") if "T" in given else given)
    except ValueError:
        return None
    if moment.tzinfo is None:
        if "T" in given:
            return None
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _limit(query: Query) -> int:
    given = query.get("limit", str(MAX_PAGE))
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= MAX_PAGE):
        raise InvalidRequest(
            f"limit is {given!r:.80}; allowed: a whole number from 1 to {MAX_PAGE}", param="limit"
        )
    return int(given)


def _after(query: Query) -> tuple[float, str] | None:
    given = query.get("after")
    if given is None:
        return None
    at, mark, generation_id = given.partition("~")
    try:
        started_at = float(at)
    except ValueError:
        started_at = math.nan
    if not mark or not math.isfinite(started_at):
        raise InvalidRequest(f"after is {given!r:.80}; allowed: the 'next' of a page", param="after")
    return started_at, generation_id
