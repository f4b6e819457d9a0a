"""Security headers of every answer, for browsers and caches, and bounds of a request's headers."""

from typing import Final

from gateway.contracts.dialect import Header

SECURITY_HEADERS: Final[tuple[Header, ...]] = (
    # Browsers must not guess that an answer is a page or a script.
    (b"x-content-type-options", b"nosniff"),
    # An answer is only for its caller: proxies and browsers must not store it.
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)
"""CORS headers are only sent with ``server.cors_origins``; without, pages of other origins are blocked."""

MAX_HEAD_BYTES: Final = 32_768
"""Most bytes of request line and headers: many times a long ``tracestate`` and a proxy's cookies."""
MAX_HEADERS: Final = 128  # most headers of a request; one that passed three proxies has about 30
HEAD_TIMEOUT_S: Final = 15.0  # longest time from a request's first byte to the end of its headers
