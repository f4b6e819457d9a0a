"""Headers of every answer for browsers and caches, and the bounds of a connection."""

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.contracts.dialect import Header

SECURITY_HEADERS: Final[tuple[Header, ...]] = (
    # Browsers do not guess that an answer is a page or a script.
    (b"x-content-type-options", b"nosniff"),
    # An answer is its caller's own: no proxy and no browser stores it.
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)
"""Those of CORS come with ``server.cors_origins`` alone; without, no page of another origin can ask."""


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins (``*``: all) ask with a key of their own and read the answers."""
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
    )


MAX_HEAD_BYTES: Final = 32_768
"""Longest request line and headers together; a long ``tracestate`` and a proxy's cookies fit many times."""
MAX_HEADERS: Final = 128
"""Most headers of a request; through three proxies there are about 30."""
HEAD_TIMEOUT_S: Final = 15.0
"""Longest time from a request's first byte to the end of its headers."""
