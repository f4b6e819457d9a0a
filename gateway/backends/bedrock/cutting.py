"""botocore's connections, each known to the wire of the call that uses it.

Imports botocore, and is therefore imported in threads only.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

from gateway.backends.bedrock.wire import Wire


def make_cuttable(client: Any, wire: Callable[[], Wire | None]) -> None:
    """Make the client's connections tell the wire of the calling thread which socket they use.

    botocore offers no way to reach a connection before its response is there, which is when a call hangs
    most; so its pools are told to make connections of our own kind.
    """
    pools = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool, connection in (
        ("http", AWSHTTPConnectionPool, AWSHTTPConnection),
        ("https", AWSHTTPSConnectionPool, AWSHTTPSConnection),
    ):
        kind = type(f"Cuttable{connection.__name__}", (_Telling, connection), {"wire": staticmethod(wire)})
        pools[scheme] = type(f"Cuttable{pool.__name__}", (pool,), {"ConnectionCls": kind})


class _Telling:
    """Mixed into a connection: tells its socket when it has connected, and when it is used again."""

    wire: Callable[[], Wire | None]
    sock: Any

    def connect(self) -> None:
        """Connect."""
        super().connect()  # type: ignore[misc]
        self._tell()

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request."""
        self._tell()
        return super().request(*args, **kwargs)  # type: ignore[misc]

    def _tell(self) -> None:
        wire = self.wire()
        # Through a proxy there is TLS inside TLS: the outer connection is an attribute.
        sock = getattr(self.sock, "socket", self.sock)
        if wire is not None and isinstance(sock, socket.socket):
            wire.hold(sock)
