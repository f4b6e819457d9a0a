"""The application: every path of the HTTP edge on one FastAPI app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from gateway.contracts.refusals import first_refusal, path_of
from gateway.errors import PublicError, public_error
from gateway.http import (
    admin_adapters,
    admin_admission,
    admin_canary,
    admin_chaos,
    admin_drain,
    admin_keys,
    admin_prompts,
    admin_routing,
    admin_shadow,
    admin_usage,
    monitors,
    openai,
    schema,
    tokenize,
)
from gateway.http.exchange import Exchange
from gateway.http.generate import native
from gateway.http.idempotency import Idempotency
from gateway.http.middleware import EdgeMiddleware
from gateway.http.path_labels import PathLabels
from gateway.http.respond import CALLER_ERRORS, error_reply, shape_of
from gateway.http.sagemaker import sagemaker
from gateway.http.surfaces import Shown, everything, of_surface
from gateway.http.websocket import GenerateSocket
from gateway.ports import Services

GENERATE_SOCKET: Final = "/v1/generate/ws"


class GatewayApp(FastAPI):
    """FastAPI, whose OpenAPI document also tells of the endpoints that are plain ASGI apps.

    Posts to the paths of ``hot`` go straight to their endpoints, past the framework's six layers, of which
    our endpoints use none. Everything else takes the framework's way.
    """

    def __init__(self, hot: Mapping[str, ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._hot.get(scope["path"])
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, routes=self.routes)
            self.openapi_schema = schema.add_paths(document, self.routes)
        return self.openapi_schema


def create_app(
    services: Services, lifespan: Lifespan[Any] | None = None, *, shown: Shown = everything
) -> FastAPI:
    """The app over ``services``; ``lifespan`` owns everything that must start and stop with it.

    ``shown`` says which paths it has; others are not there at all.

    The endpoints of callers and monitors are plain ASGI apps, so that no framework stands between a token
    and the socket; further routers (the operators') may be included in the usual way: what they raise is
    answered in the same shapes.
    """
    idempotency = Idempotency(services.idempotency, wait_s=services.limits.request_timeout_s)
    generating = {
        **openai.completions(services, idempotency),
        **native(services, idempotency),
        **sagemaker(services, idempotency),
    }
    routes = of_surface(_routes(services, generating, idempotency), shown)
    places = PathLabels([route.path for route in routes])
    app = GatewayApp(
        {
            path: EdgeMiddleware(endpoint, services=services, places=places)
            for path, endpoint in generating.items()
            if shown(path)
        },
        title="Sluice",
        version=services.version,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.router.routes.extend(routes)
    for error in CALLER_ERRORS:
        app.add_exception_handler(error, _known_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_middleware(EdgeMiddleware, services=services, places=places)
    return app


def _routes(
    services: Services, generating: Mapping[str, ASGIApp], idempotency: Idempotency
) -> list[Route | WebSocketRoute]:
    """Every path of ours, so that the framework knows which methods each takes."""
    posted: dict[str, ASGIApp] = {
        **generating,
        **tokenize.tokenizing(services, idempotency),
        **admin_prompts.budget_preview(services),
    }
    read: dict[str, ASGIApp] = {
        **monitors.monitors(services),
        **openai.models(services),
        **admin_prompts.prompt_pages(services),
        **admin_admission.admission_pages(services),
    }
    if services.adapters is not None:
        read.update(admin_adapters.adapter_pages(services, services.adapters))
        posted.update(admin_adapters.adapter_changes(services, services.adapters))
    put: dict[str, ASGIApp] = {}
    if services.routing is not None:
        read.update(admin_routing.routing_pages(services, services.routing))
        put["/admin/routing"], changes = admin_routing.routing_changes(services, services.routing)
        posted.update(changes)
    if services.canary is not None:
        read["/admin/canary"], orders = admin_canary.canary_pages(services, services.canary)
        posted.update(orders)
    if services.shadow is not None:
        read["/admin/shadow"] = admin_shadow.shadow_page(services, services.shadow)
    if services.drain is not None:
        posted["/admin/drain"] = admin_drain.drainer(services, services.drain)
    delete: dict[str, ASGIApp] = {}
    if services.key_desk is not None:
        read["/admin/keys"] = admin_keys.key_list(services, services.key_desk)
        posted["/admin/keys"] = admin_keys.key_maker(services, services.key_desk)
        delete["/admin/keys/{id}"] = admin_keys.key_revoker(services, services.key_desk)
    if services.usage is not None:
        read.update(admin_usage.usage_pages(services, services.usage))
    if services.chaos is not None:
        read["/admin/chaos"], posted["/admin/chaos"] = admin_chaos.chaos_pages(services, services.chaos)
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()),
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in read.items()),
        *(Route(path, endpoint, methods=["PUT"]) for path, endpoint in put.items()),
        *(Route(path, endpoint, methods=["DELETE"]) for path, endpoint in delete.items()),
        WebSocketRoute(GENERATE_SOCKET, GenerateSocket(services)),
    ]


async def _known_error(request: Request, error: Exception) -> Response:
    return _response(request, public_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404 and path == GENERATE_SOCKET and _served(request.app, path):
        public = PublicError(
            426, "upgrade_required", f"{path} takes a WebSocket; allowed: Upgrade: websocket"
        )
        return _response(request, public, {"upgrade": "websocket"})
    if error.status_code == 404:
        public = PublicError(404, "not_found", f"there is nothing at {path_of([path])}")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        public = PublicError(
            405, "method_not_allowed", f"{request.method} is not allowed here; allowed: {allowed}"
        )
    else:
        code = "invalid_request" if error.status_code < 500 else "internal"
        public = PublicError(error.status_code, code, str(error.detail))
    return _response(request, public, error.headers)


def _served(app: FastAPI, path: str) -> bool:
    return any(isinstance(route, WebSocketRoute) and route.path == path for route in app.routes)


async def _validation_error(request: Request, error: Exception) -> Response:
    """A body or parameter of a framework's endpoint; the place ("body", "query") is not part of the path."""
    assert isinstance(error, RequestValidationError)
    errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
    return _response(request, public_error(first_refusal(errors)))


def _response(request: Request, error: PublicError, headers: Mapping[str, str] | None = None) -> Response:
    exchange = Exchange.of(request.scope)
    exchange.error_code = error.code
    reply = error_reply(error, exchange.request_id, shape_of(request.scope["path"]))
    response = Response(reply.body, reply.status, headers, media_type="application/json")
    for name, value in reply.headers:
        response.headers[name.decode()] = value.decode()
    return response
