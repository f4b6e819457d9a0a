"""Who may ask: the caller that the key belongs to, and the role that an endpoint needs."""

from accounting.keys import NO_LIMITS
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import Forbidden
from gateway.http.exchange import Exchange
from gateway.ports import Services


def caller_of(services: Services, exchange: Exchange) -> Caller:
    """The caller, whose limits the answer will report. Raises MissingKey, InvalidKey."""
    caller = services.keys.authenticate(exchange.key)
    exchange.caller = caller
    if caller.limits != NO_LIMITS:
        exchange.limit_headers = lambda: services.limiter.headers(caller)
    return caller


def require_role(services: Services, exchange: Exchange, role: CallerRole) -> Caller:
    """The caller, when its key has ``role`` or is an admin's. Raises MissingKey, InvalidKey, Forbidden."""
    caller = caller_of(services, exchange)
    allowed = dict.fromkeys((role, CallerRole.ADMIN))
    if caller.role not in allowed:
        shown = " or ".join(f"'{one.value}'" for one in allowed)
        raise Forbidden(f"the key's role is '{caller.role.value}'; allowed: {shown}")
    return caller
