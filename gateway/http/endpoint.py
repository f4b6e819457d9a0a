"""The plain ASGI app around a handler that answers with one whole reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from accounting.keys import NO_LIMITS
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import Forbidden
from gateway.http.client_disconnect import ClientGone
from gateway.http.exchange import Exchange, Reply
from gateway.http.respond import CALLER_ERRORS, ErrorShape, refuse
from gateway.ports import Services

Handler = Callable[[Exchange, Scope, Receive], Awaitable[Reply]]


class Endpoint:
    """Runs ``handler`` and sends what it returns; errors that callers know are sent in ``shape``."""

    def __init__(self, handler: Handler, shape: ErrorShape) -> None:
        self._handler = handler
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry; answers through the exchange, not through ``send``."""
        exchange = Exchange.of(scope)
        try:
            reply = await self._handler(exchange, scope, receive)
        except ClientGone:
            return
        except CALLER_ERRORS as error:
            await refuse(exchange, error, self._shape)
        else:
            await exchange.reply(reply)


def caller_of(services: Services, exchange: Exchange) -> Caller:
    """The caller; the answer will tell how its limits stand. Raises MissingKey, InvalidKey."""
    caller = services.keys.authenticate(exchange.bearer)
    exchange.tenant = caller.tenant
    if caller.limits != NO_LIMITS:
        exchange.limits_told = lambda: services.limiter.headers(caller)
    return caller


def require_role(services: Services, exchange: Exchange, role: CallerRole) -> Caller:
    """The caller, when its key has ``role`` or is an admin's.

    Raises:
        MissingKey: no key was sent.
        InvalidKey: the key is unknown.
        Forbidden: the key has another role.
    """
    caller = caller_of(services, exchange)
    allowed = dict.fromkeys((role, CallerRole.ADMIN))
    if caller.role not in allowed:
        shown = " or ".join(f"'{one.value}'" for one in allowed)
        raise Forbidden(f"the key's role is '{caller.role.value}'; allowed: {shown}")
    return caller
