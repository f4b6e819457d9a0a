"""Headers with which a Sluice that uses another Sluice as its worker names the tenant it asks for.

The worker accepts ``x-sluice-tenant`` and ``x-sluice-org`` from keys of the roles ``front`` and ``admin`` and
ignores them from all others. ``x-sluice-cache-salt`` is accepted from every key: it divides the prefix cache
of the key's own tenant and affects no other. Priority, deadline, session and user are fields of the body.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gateway.contracts.refusals import not_allowed
from gateway.contracts.values import Caller, CallerRole

WORD: Final = r"^[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,127}$"
"""Pattern of a tenant, an organization or a salt: a printable word, since metrics and reports show it."""
TENANT: Final = b"x-sluice-tenant"
ORG: Final = b"x-sluice-org"
CACHE_SALT: Final = b"x-sluice-cache-salt"

_is_word = re.compile(WORD).fullmatch
SPEAKING: Final = frozenset({CallerRole.FRONT, CallerRole.ADMIN})
"""Roles whose keys may ask for other tenants."""


def front_headers(tenant: str | None, org: str | None, salt: str) -> bytes:
    """The header lines, each with its CRLF."""
    given = ((TENANT, tenant), (ORG, org), (CACHE_SALT, salt))
    return b"".join(
        [b"%b: %b\r\n" % (name, word.encode()) for name, word in given if word and _is_word(word)]
    )


def on_behalf(caller: Caller, headers: Mapping[bytes, bytes]) -> Caller:
    """The caller, or the tenant that it asks for. Raises InvalidRequest: a header is not a valid word."""
    if CACHE_SALT in headers:
        salt = _word(headers, CACHE_SALT)
        # A tenant's name has no blank, so this salt equals no tenant's default salt.
        caller = replace(caller, own_salt=f"{caller.tenant} {salt}")
    if caller.role in SPEAKING and TENANT in headers:
        org = _word(headers, ORG) if ORG in headers else None
        return replace(caller, tenant=_word(headers, TENANT), org=org, by_front=True)
    return caller


def _word(headers: Mapping[bytes, bytes], name: bytes) -> str:
    text = headers[name].decode("latin-1")
    if not _is_word(text):
        raise not_allowed(
            name.decode(), f"has {len(text)} characters", "1 to 128 letters, digits and _ . : @ / -"
        )
    return text
