"""Who may ask: the caller that the key belongs to, and the role that an endpoint needs."""

from accounting.keys import NO_LIMITS
from gateway.contracts.front_headers import on_behalf
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import Forbidden, InvalidKey
from gateway.http.exchange import Exchange
from gateway.ports import Services


def identify(services: Services, exchange: Exchange) -> Caller:
    """Who asks, by key and headers. Raises MissingKey, InvalidKey, RateLimited, InvalidRequest."""
    try:
        caller = services.keys.authenticate(exchange.key)
    except InvalidKey:
        services.failed_logins.failed(exchange.address)
        raise
    return on_behalf(caller, exchange.headers)


def caller_of(services: Services, exchange: Exchange) -> Caller:
    """The same, and its limits are reported in the answer."""
    caller = identify(services, exchange)
    exchange.caller = caller
    if caller.limits != NO_LIMITS:
        exchange.limit_headers = lambda: services.limiter.headers(caller)
    return caller


def require_role(services: Services, exchange: Exchange, *roles: CallerRole) -> Caller:
    """The caller, when its key has one of ``roles`` or is an admin's. Raises Forbidden, as identify."""
    caller = caller_of(services, exchange)
    allowed = dict.fromkeys((*roles, CallerRole.ADMIN))
    if caller.role not in allowed:
        shown = " or ".join(f"'{one.value}'" for one in allowed)
        raise Forbidden(f"the key's role is '{caller.role.value}'; allowed: {shown}")
    return caller
