"""``/console``: the operator's page, its files, and its sessions."""

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gateway.contracts.refusals import not_allowed
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import Forbidden, InvalidKey, MissingKey, RateLimited
from gateway.http.authorize import require_role
from gateway.http.body import read_body
from gateway.http.exchange import EVENT_STREAM, Exchange
from gateway.http.respond import CALLER_ERRORS, json_of
from gateway.keys.sessions import COOKIE, SESSION_S

PATH: Final = "/console"
MAX_BODY: Final = 4_096
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS: Final = {
    "content-security-policy": CSP,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
ROLES: Final = (CallerRole.VIEWER, CallerRole.OPERATOR)  # roles besides admin that may use the console
_FOLDER: Final = files("gateway") / "bundled" / "console"


async def _page(request: Request) -> Response:
    """The page; it is served without a key but shows no data without one."""
    page = (_FOLDER / "index.html").read_bytes()
    return Response(page, headers=HEADERS, media_type="text/html; charset=utf-8")


async def _session(request: Request) -> Response:
    """``GET``: who is signed in; ``POST``: sign in with a key; ``DELETE``: sign out."""
    exchange = Exchange.of(request.scope)
    if request.method == "DELETE":
        return _answer({}, "", 0, request)
    if request.method == "GET":
        try:
            return json_of(_who(require_role(exchange, *ROLES)))
        except (MissingKey, InvalidKey, Forbidden):
            return json_of(None)  # a refusal would be an error in the browser's log
    caller = await _signed_in(exchange, request)
    token = exchange.services.sessions.issue(caller.key_id)
    return _answer(_who(caller), token, SESSION_S, request)


async def _signed_in(exchange: Exchange, request: Request) -> Caller:
    exchange.check_origin()
    body = await read_body(exchange, request.receive, MAX_BODY)
    try:
        key = orjson.loads(body)["key"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        key = None
    if not isinstance(key, str) or not key:
        raise not_allowed("key", "is missing or is not text", "a key of role viewer, operator or admin")
    exchange.headers[b"authorization"] = b"Bearer " + key.encode("latin-1", "replace")
    caller = require_role(exchange, *ROLES, reads=True)
    await exchange.services.console.signed_in(caller.key_id, exchange.address or "")
    return caller


def _who(caller: Caller) -> dict[str, str]:
    return {"key_id": caller.key_id, "role": caller.role.value, "tenant": caller.tenant}


def _answer(body: object, token: str, seconds: int, request: Request) -> Response:
    response = json_of(body)
    # A proxy that terminates TLS sends the header. A client that forges it only gets an unusable cookie.
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(
        COOKIE, token, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict"
    )
    return response


async def _live(request: Request) -> Response:
    """The state of this process every two seconds, as server-sent events."""
    exchange = Exchange.of(request.scope)
    require_role(exchange, *ROLES)
    console = exchange.services.console
    if console.streams >= console.most_streams:
        raise RateLimited(f"{console.most_streams} consoles are open at this gateway", retry_after_ms=5_000)

    async def events() -> AsyncIterator[bytes]:
        if console.streams >= console.most_streams:
            return
        console.streams += 1
        try:
            while _may_look(exchange):
                yield b"data: " + orjson.dumps(console.live()) + b"\n\n"
                await asyncio.sleep(console.pause_s)
        finally:
            console.streams -= 1

    return StreamingResponse(events(), media_type=EVENT_STREAM.decode())


def _may_look(exchange: Exchange) -> bool:
    """Whether the key is still accepted, and the session has not ended."""
    try:
        require_role(exchange, *ROLES)
    except CALLER_ERRORS:
        return False
    return True


class _Files(StaticFiles):
    """The page's files, with the page's headers."""

    def file_response(self, *args: object, **named: object) -> Response:
        response = super().file_response(*args, **named)  # type: ignore[arg-type]
        response.headers.update(HEADERS)
        return response


ROUTES: Final = (
    Route(PATH, _page),
    Route(f"{PATH}/session", _session, methods=["GET", "POST", "DELETE"]),
    Route(f"{PATH}/live", _live),
    Mount(f"{PATH}/assets", _Files(directory=str(_FOLDER))),
)
