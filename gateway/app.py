"""The application: every path of the HTTP edge on one FastAPI app."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from gateway.contracts.refusals import Readable, first_refusal, path_of
from gateway.errors import PublicError, public_error
from gateway.http import (
    audio,
    batches,
    console,
    embeddings,
    files,
    models,
    monitors,
    pages,
    rerank,
    responses,
    tokenize,
)
from gateway.http.admin import adapters, canary, chaos, keys, process, prompts, routing, usage
from gateway.http.exchange import Exchange
from gateway.http.generating import ROUTES, generating
from gateway.http.idempotency import Idempotency
from gateway.http.middleware import EdgeMiddleware, with_cors
from gateway.http.respond import CALLER_ERRORS, error_reply, response_of, shape_of
from gateway.http.routes import DirectRoute
from gateway.http.surfaces import Shown, everything, nothing
from gateway.http.websocket import GenerateSocket, deny
from gateway.ports import Services

GENERATE_SOCKET: Final = "/v1/generate/ws"
_ROUTERS: Final = (
    monitors.router,
    monitors.deep_router,
    models.router,
    tokenize.router,
    tokenize.messages,
    embeddings.router,
    rerank.router,
    audio.router,
    tokenize.responses,
    responses.router,
    files.uploads,
    files.router,
    batches.creation,
    batches.router,
    adapters.router,
    adapters.slow,
    canary.router,
    keys.router,
    process.router,
    prompts.router,
    routing.router,
    usage.router,
)


class GatewayApp(FastAPI):
    """FastAPI, with raw ASGI for the paths in ``hot``, such as those that generate.

    A POST to such a path goes straight to its endpoint and skips the framework's six layers, none of which
    the endpoint uses. HEAD is handled as GET; the server leaves the body out.
    """

    def __init__(
        self,
        hot: Mapping[str, ASGIApp],
        cors_origins: Sequence[str],
        described: Sequence[BaseRoute],
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._described = described
        self._document: tuple[str, bytes] | None = None
        self._describing = asyncio.Lock()
        self._hot = hot
        # For servers. ``__call__`` adds a coroutine, which would be resumed after every wait of a request.
        self.entry: ASGIApp = with_cors(self._dispatch, cors_origins) if cors_origins else self._dispatch

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made once: this app's paths, and those described for another port."""
        if not self.openapi_schema:
            routes = [*self._described, *self.routes]
            self.openapi_schema = get_openapi(title=self.title, version=self.version, routes=routes)
        return self.openapi_schema

    def setup(self) -> None:
        """Add the OpenAPI document's route. FastAPI's own serializes the document for each request."""
        if self.openapi_url:
            self.add_route(self.openapi_url, self._describe, include_in_schema=False)

    async def _describe(self, request: Request) -> Response:
        root: str = request.scope.get("root_path", "").rstrip("/")
        async with self._describing:
            document = self._document
            if document is None or document[0] != root:
                # In a thread, because it takes over a second.
                document = self._document = root, await asyncio.to_thread(self._written, root)
        return Response(document[1], media_type="application/json")

    def _written(self, root: str) -> bytes:
        servers = {"servers": [{"url": root}]} if root else {}
        return orjson.dumps({**self.openapi(), **servers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.entry(scope, receive, send)

    def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # No coroutine of its own: it would be one more frame to resume at every wait of a request.
        endpoint: ASGIApp = super().__call__
        if scope["type"] == "http":
            if scope["method"] == "POST":
                endpoint = self._hot.get(scope["path"], endpoint)
            elif scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        return endpoint(scope, receive, send)


def create_app(
    services: Services,
    lifespan: Lifespan[Any] | None = None,
    *,
    shown: Shown = everything,
    described: Shown = nothing,
) -> GatewayApp:
    """Create the app on ``services``; ``lifespan`` owns everything that must start and stop with it.

    ``shown`` selects the paths that the app serves; its OpenAPI document also has those that ``described``
    selects. More routers may be included in the usual way; their errors are answered in the same formats.
    """
    idempotency = Idempotency(services.idempotency, wait_s=services.limits.request_timeout_seconds)
    routers = _ROUTERS if services.chaos is None else (*_ROUTERS, chaos.router)
    every: list[APIRoute | WebSocketRoute] = [
        *ROUTES,
        *(route for router in routers for route in router.routes if isinstance(route, APIRoute)),
        WebSocketRoute(GENERATE_SOCKET, GenerateSocket(services)),
    ]
    endpoints = generating(services, idempotency) | {
        route.path: partial(route.answer, idempotency) for route in every if isinstance(route, DirectRoute)
    }
    routes = [route for route in every if shown(route.path)]
    paths = frozenset(route.path for route in routes)
    app = GatewayApp(
        {
            path: EdgeMiddleware(endpoint, services=services, paths=paths)
            for path, endpoint in endpoints.items()
            if shown(path)
        },
        services.limits.cors_origins,
        [route for route in every if described(route.path) and not shown(route.path)],
        title="Sluice",
        version=services.version,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url="/openapi.json" if shown("/openapi.json") else None,
        docs_url=None,
        redoc_url=None,
    )
    # All apps share the same routes, which find the state of their app here.
    app.state.services = services
    app.state.idempotency = idempotency
    app.state.direct = endpoints
    app.state.created = int(services.unix_time())
    app.router.default = _no_path
    app.router.routes.extend(routes)
    static = (*pages.ROUTES, *console.ROUTES) if services.limits.console else pages.ROUTES
    app.router.routes.extend(page for page in static if shown(page.path))
    for error in CALLER_ERRORS:
        app.add_exception_handler(error, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_middleware(EdgeMiddleware, services=services, paths=paths)
    return app


async def _no_path(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise HTTPException(404)
    error = PublicError(404, "not_found", f"{path_of([scope['path']])} takes no WebSocket")
    await deny(Exchange.of(scope), error, scope)


async def _known_error(request: Request, error: Exception) -> Response:
    return _response(request, public_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an error that the framework raises, such as for an unknown path or method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers
    sockets = {route.path for route in request.app.routes if isinstance(route, WebSocketRoute)}
    if error.status_code == 404 and path in sockets:
        public = PublicError(
            426, "upgrade_required", f"{path} takes a WebSocket; allowed: Upgrade: websocket"
        )
        return _response(request, public, {"upgrade": "websocket"})
    if error.status_code == 404:
        # A client adds its path to a base URL with or without /v1.
        meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
        known = any(getattr(route, "path", None) == meant for route in request.app.routes)
        hint = f"; {meant} is served: correct the base URL's /v1" if known else ""
        public = PublicError(404, "not_found", f"there is nothing at {path_of([path])}{hint}")
    elif error.status_code == 405:
        allowed = ", ".join(_methods(request))
        headers = {"Allow": allowed}
        public = PublicError(
            405, "method_not_allowed", f"{request.method} is not allowed here; allowed: {allowed}"
        )
    else:
        code = "invalid_request" if error.status_code < 500 else "internal"
        public = PublicError(error.status_code, code, str(error.detail))
    return _response(request, public, headers)


def _methods(request: Request) -> list[str]:
    """The methods of all routes at the request's path; the framework only names the first route's."""
    methods = {
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer an invalid body or parameter; the field's path omits its location ("body", "query")."""
    assert isinstance(error, RequestValidationError)
    errors = [
        {**one, "loc": one["loc"][1:], "input": Readable(one["input"])}
        if one["loc"][0] == "query" and isinstance(one["input"], str)
        else {**one, "loc": one["loc"][1:]}
        for one in error.errors()
    ]
    return _response(request, public_error(first_refusal(errors)))


def _response(request: Request, error: PublicError, headers: Mapping[str, str] | None = None) -> Response:
    exchange = Exchange.of(request.scope)
    exchange.error = error
    shape = shape_of(exchange, request.scope["path"])
    response = response_of(error_reply(error, exchange.request_id, shape))
    response.headers.update(headers or {})
    return response
