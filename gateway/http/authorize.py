"""Authentication of the caller by its key, and the check of the role that an endpoint needs."""

from accounting.keys import NO_LIMITS
from gateway.contracts.front_headers import on_behalf
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import Forbidden, InvalidKey
from gateway.http.exchange import Exchange


def caller_of(exchange: Exchange, *, reads: bool = False) -> Caller:
    """The caller, by key and headers or by a console session; ``reads``: the request changes nothing.

    Its limits are reported in the answer's headers.

    Raises MissingKey, InvalidKey, RateLimited, InvalidRequest; Forbidden: a viewer may only read, and
    without a key a page of another origin may do nothing.
    """
    services, key, token = exchange.services, exchange.key, None
    try:
        if key is None and (token := exchange.session) is not None:
            exchange.check_origin()
            caller = services.sessions.caller(token)
        else:
            caller = services.keys.authenticate(key)
            if key is None:  # keys are off
                exchange.check_page(services.limits.cors_origins)
    except InvalidKey:
        services.failed_logins.failed(exchange.address)
        raise
    exchange.caller = caller = on_behalf(caller, exchange.headers)
    if caller.role is CallerRole.VIEWER and not (reads or exchange.reads):
        raise Forbidden("the key's role is 'viewer', which may only read; allowed: another role")
    if caller.limits is not NO_LIMITS and caller.limits != NO_LIMITS:
        exchange.limit_headers = lambda: services.limiter.headers(caller)
    return caller


def require_role(exchange: Exchange, *roles: CallerRole, reads: bool = False) -> Caller:
    """The caller, if its role is one of ``roles`` or admin. Raises Forbidden, and as :func:`caller_of`."""
    caller = caller_of(exchange, reads=reads)
    allowed = dict.fromkeys((*roles, CallerRole.ADMIN))
    if caller.role not in allowed:
        shown = " or ".join(f"'{one.value}'" for one in allowed)
        raise Forbidden(f"the key's role is '{caller.role.value}'; allowed: {shown}")
    return caller
