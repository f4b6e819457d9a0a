"""The outermost ASGI layer: adds ids to every response, reports it, and answers every unexpected error."""

import asyncio
from collections.abc import Awaitable, Container, MutableMapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import Draining
from gateway.http.exchange import SCOPE_KEY, ClientDisconnect, ClientGone, Exchange
from gateway.http.path_labels import CONTRACTS, MONITORS, UNKNOWN
from gateway.http.respond import log_defect, refuse
from gateway.ports import Services


class EdgeMiddleware:
    """Creates the :class:`Exchange` of each request, and answers errors that nothing else has answered.

    The raw endpoints send their responses through the exchange, so that no wrapper is called per token; the
    framework's responses reach it by a wrapped ``send``. ``paths``: those that the framework may not route.
    """

    def __init__(self, app: ASGIApp, *, services: Services, paths: Container[str] = ()) -> None:
        self._app = app
        self._services = services
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        exchange = Exchange.open(scope, send, self._services)

        async def through_exchange(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await exchange.start(message["status"], message.get("headers", ()))
            else:
                await exchange.send(message)

        try:
            await self._app(scope, receive, through_exchange)
        except asyncio.CancelledError:
            # The server's shutdown timeout is over; uvicorn would answer with a bare 500 and log a defect.
            if exchange.started or scope["type"] != "http":
                raise
            stopping = Draining("the gateway is stopping", retry_after_ms=1000)
            await refuse(exchange, stopping, scope["path"])
        except ClientGone:
            return
        except Exception as error:
            if exchange.started or scope["type"] == "websocket":
                # No error can be sent any more: the server closes a connection with an incomplete response.
                log_defect(error, exchange.request_id)
            else:
                await refuse(exchange, error, scope["path"])
        finally:
            if not exchange.reported:
                self._report(exchange, scope)
            exchange.end(scope)

    def _report(self, exchange: Exchange, scope: Scope) -> None:
        """Emit the outcome of a request that was refused before its journey or needs none."""
        route, path = scope.get("route"), scope["path"]  # the route is FastAPI's
        exchange.path = route.path if route is not None else path if path in self._paths else UNKNOWN
        if exchange.path not in MONITORS:
            exchange.contract = CONTRACTS.get(exchange.path)
            self._services.emit_edge(exchange)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow pages of these origins (``*``: all) to send requests with their own key and read the answers."""

    def through_send(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        connection: ClientDisconnect | None = scope.get(SCOPE_KEY)
        if connection is not None:
            # Written by the protocol itself, an answer's head would lack the headers that ``send`` adds.
            connection.begin = None
        return app(scope, receive, send)

    return CORSMiddleware(
        through_send, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
    )
