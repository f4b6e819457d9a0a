"""FastAPI routes that run the edge's checks first, and raw ASGI apps in the OpenAPI document."""

from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args, get_origin, get_type_hints

from fastapi import APIRouter, Depends, Header, Security, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.contracts.native_answer import ErrorBody
from gateway.contracts.openai_answer import OpenAIErrorBody
from gateway.contracts.refusals import FEW_FIELDS_BYTES, not_allowed, parse, path_of
from gateway.contracts.values import CallerRole
from gateway.errors import NotFound
from gateway.http.authorize import caller_of, require_role
from gateway.http.body import read_body
from gateway.http.disconnect_watch import until_gone
from gateway.http.exchange import Exchange
from gateway.http.idempotency import CallerRequest, Idempotency, IdempotencyKey, sent_key
from gateway.ports import Services

CLIENTS_PARAMETERS: Final[Mapping[str, bool]] = {"beta": False, "api-version": False}
"""Parameters that the clients of Anthropic's beta and of Azure add to every request; they have no effect."""

KEY: Final = Security(HTTPBearer(auto_error=False, scheme_name="key"))
"""Documents that a key is needed; :class:`EdgeRoute` checks the key."""


def _direct(path: str) -> ASGIApp:
    """An ASGI app that calls the path's raw endpoint, for requests that still come through the framework."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["app"].state.direct[path](scope, receive, send)

    return app


@dataclass(frozen=True, slots=True)
class FromJson:
    """Validates a body from its bytes, as :func:`parse` does: strictly, with the gateway's error messages."""

    uncounted_bytes: int = FEW_FIELDS_BYTES

    def __get_pydantic_core_schema__(
        self, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            partial(parse, source, uncounted_bytes=self.uncounted_bytes), handler(source)
        )


T = TypeVar("T")
Json = Annotated[T, FromJson()]


class _ReadRequest(Request):
    """A request whose body has been read; ``json`` returns bytes, which the body's model parses."""

    def __init__(self, request: Request, raw: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._raw


class EdgeRoute(APIRoute):
    """A route for callers with a key, which must have ``role`` if that is set.

    FastAPI reads a body of any size before it resolves a dependency. So this route checks the key, the role
    and the body's bounds first, as the raw endpoints do. If the caller disconnects, work of the methods in
    ``ends_with_caller`` is cancelled. An operator's change is not: once begun, it is finished and audited. A
    ``counted`` request counts against the key's requests per minute, before its body is read, and while it
    runs against the key's concurrent requests. A query parameter that the path does not know is refused, but
    callers' paths know those that official clients add to every request.
    """

    role: ClassVar[CallerRole | None] = None
    ends_with_caller: ClassVar[frozenset[str]] = frozenset({"GET"})
    counted: ClassVar[bool] = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        parameters = {
            one.alias: get_origin(one.field_info.annotation) is list
            for one in get_flat_params(self.dependant)
            if not isinstance(one.field_info, params.Path | params.Header)
        }
        if self.role is None:
            parameters |= CLIENTS_PARAMETERS

        async def checked(request: Request) -> Response:
            exchange = Exchange.of(request.scope)
            services = exchange.services
            if self.role is None:
                caller_of(exchange)
            else:
                reads = request.method == "GET" and self.role is CallerRole.OPERATOR
                viewers = (CallerRole.VIEWER,) if reads else ()
                require_role(exchange, *viewers, self.role)
            if "\x00" in request.scope["path"]:
                raise NotFound("there is nothing at a path with a null character (U+0000)")
            _check_query(request, parameters)
            if self.counted:
                await services.limiter.enter(exchange.known_caller)
            raw = b""
            if self.body_field is not None:
                raw = await read_body(exchange, request.receive, services.limits.max_body_bytes)
            running = services.limiter.running(exchange.known_caller) if self.counted else nullcontext()

            ends = request.method in self.ends_with_caller
            watch = until_gone(exchange, request.receive) if ends else nullcontext()
            async with watch:
                with running:
                    return await handle(_ReadRequest(request, raw or b"{}"))

        return checked


class CallerRoute(EdgeRoute):
    """A route for any key."""

    ends_with_caller = frozenset({"GET", "POST"})


class CountedRoute(CallerRoute):
    """A route for any key, whose limits are enforced."""

    counted = True


class CreationRoute(EdgeRoute):
    """A counted route for any key, whose endpoint may read the body itself. A disconnect cancels nothing:
    object and stored answer remain.
    """

    counted = True


class DirectRoute(CountedRoute):
    """A counted route whose function takes (body, call) and returns an awaitable Reply.

    FastAPI only documents it: the app's posts go straight to :meth:`answer`, past the framework, whose layers
    are a quarter of the cost of a request for vectors. The function itself counts the request against the
    key's concurrent requests, so that one that waits for another with its idempotency key does not count.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        self.app = _direct(path)
        self._model: type[BaseModel] = get_type_hints(endpoint)["given"]

    async def answer(self, idempotency: Idempotency, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as a plain ASGI app; the middleware answers errors."""
        exchange = Exchange.of(scope)
        services = exchange.services
        await services.turns.next()
        caller = caller_of(exchange)
        await services.limiter.enter(caller)
        body = await read_body(exchange, receive, services.limits.max_body_bytes)
        given = parse(self._model, body)
        async with until_gone(exchange, receive) as release:
            key = sent_key(exchange)
            call = CallerRequest(exchange, idempotency, scope["path"], key, body, release)
            reply = await self.endpoint(given, call)
        await exchange.reply(reply)


class OperatorRoute(EdgeRoute):
    """A route for operators and admins."""

    role = CallerRole.OPERATOR


class CancellableRoute(OperatorRoute):
    """An operator's route whose work is cancelled on a disconnect: it takes long, or changes nothing."""

    ends_with_caller = CallerRoute.ends_with_caller


class AdminRoute(EdgeRoute):
    """A route for admins."""

    role = CallerRole.ADMIN


def _check_query(request: Request, allowed: Mapping[str, bool]) -> None:
    """Refuse parameters that are not ``allowed``, or repeated unless it says so, and values that not every
    database takes. Raises InvalidRequest.
    """
    seen: set[str] = set()
    for name, value in request.query_params.multi_items():
        shown = path_of([name])
        if name not in allowed:
            raise not_allowed(shown, "is not a known field", ", ".join(allowed) or "none")
        if name in seen and not allowed[name]:
            raise not_allowed(shown, "is repeated", "once")
        if "\x00" in value:
            raise not_allowed(shown, "contains a null character (U+0000)", "text without it")
        seen.add(name)


async def _exchange(request: Request) -> Exchange:
    return Exchange.of(request.scope)


async def _services(request: Request) -> Services:
    return Exchange.of(request.scope).services


ExchangeDep = Annotated[Exchange, Depends(_exchange)]
ServicesDep = Annotated[Services, Depends(_services)]


def errors(*statuses: int, model: Any = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI document's entries for these statuses and for all other errors, all with ``model``."""
    shapes = [{"$ref": f"#/components/schemas/{one.__name__}"} for one in get_args(model) or (model,)]
    content = {"application/json": {"schema": {"anyOf": shapes} if len(shapes) > 1 else shapes[0]}}
    named: dict[int | str, dict[str, Any]] = {
        status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses
    }
    return {**named, "default": {"model": model, "description": "Any other error"}}


def form_of(text: str) -> dict[str, Any]:
    """The OpenAPI document's entry for a form with a file and, also required, the field ``text``."""
    fields = {"file": {"type": "string", "format": "binary"}, text: {"type": "string"}}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def callers_router(
    route_class: type[APIRoute],
    *refused: int,
    prefix: str = "",
    tag: str = "openai",
    model: Any = OpenAIErrorBody,
) -> APIRouter:
    """A router of paths that need a key, and document ``refused`` statuses with the error body ``model``."""
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=route_class,
        dependencies=[KEY],
        responses=errors(*refused, model=model),
    )


OPERATORS: Final[Mapping[str, Any]] = {
    "tags": ["operators"],
    "dependencies": [KEY],
    "responses": errors(400, 401, 403, 404, 409, 413, 422, 503),
}
"""Settings of every router for operators."""


_Prefer = Annotated[
    str | None, Header(description="sluice-no-fallback: an error instead of a fallback's answer.")
]
_Traceparent = Annotated[str | None, Header(description="W3C Trace Context.")]


class RawRoute(APIRoute):
    """Documents a plain ASGI app in the OpenAPI document; FastAPI handles none of its requests.

    The app is in ``direct`` of the FastAPI app's state, by path. ``answer`` is the model of a whole answer; a
    stream is documented as server-sent events.
    """

    def __init__(
        self, path: str, summary: str, tag: str, body: type, answer: Any, refused: dict[int | str, Any]
    ) -> None:
        async def documented(
            given: Any,
            idempotency_key: IdempotencyKey = None,
            prefer: _Prefer = None,
            traceparent: _Traceparent = None,
        ) -> None: ...

        documented.__annotations__["given"] = body
        stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
        super().__init__(
            path,
            documented,
            methods=["POST"],
            summary=summary,
            tags=[tag],
            dependencies=[KEY],
            response_model=answer,
            responses={200: stream, **refused},
        )
        self.app = _direct(path)
