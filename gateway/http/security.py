"""Headers of every answer for browsers and caches, and the bounds of a connection."""

from typing import Final

from gateway.contracts.dialect import Header

SECURITY_HEADERS: Final[tuple[Header, ...]] = (
    # Browsers do not guess that an answer is a page or a script.
    (b"x-content-type-options", b"nosniff"),
    # An answer is its caller's own: no proxy and no browser stores it.
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)
"""None is of CORS: a page of another origin cannot read an answer, and cannot ask with a key."""

MAX_HEAD_BYTES: Final = 32_768
"""Longest request line and headers together; a long ``tracestate`` and a proxy's cookies fit many times."""
MAX_HEADERS: Final = 128
"""Most headers of a request; behind three proxies there are about 30."""
HEAD_TIMEOUT_S: Final = 15.0
"""Longest time from a request's first byte to the end of its headers."""
MAX_CONNECTIONS: Final = 4_096
"""Connections at once unless configured. An idle one is about 20 KB, so some 80 MB."""
