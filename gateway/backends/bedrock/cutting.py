"""Gives the wire of a call botocore's socket. Imports botocore, so it is imported in threads only."""

import socket
from collections.abc import Callable
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

from gateway.backends.bedrock.call import Wire


def make_cuttable(client: Any, wire: Callable[[], Wire | None]) -> None:
    """Make the client's connections report their socket to the wire of the calling thread.

    botocore gives no access to a connection before its response has come, so its pools get connection classes
    of our own.
    """
    pools = client._endpoint.http_session._pool_classes_by_scheme
    for scheme, pool, connection in (
        ("http", AWSHTTPConnectionPool, AWSHTTPConnection),
        ("https", AWSHTTPSConnectionPool, AWSHTTPSConnection),
    ):
        kind = type(f"Cuttable{connection.__name__}", (_Reporting, connection), {"wire": staticmethod(wire)})
        names = {"ConnectionCls": kind, "wire": staticmethod(wire)}
        pools[scheme] = type(f"Cuttable{pool.__name__}", (_Releasing, pool), names)


class _Releasing:
    """Mixed into a pool: a call loses a connection that it gives back, before another call can take it.

    The garbage collector may give back the connection of an earlier call on this thread: it is left alone.
    """

    wire: Callable[[], Wire | None]

    def _put_conn(self, conn: Any) -> None:
        if (wire := self.wire()) is not None and conn is not None:
            wire.give_back(_socket_of(conn))
        super()._put_conn(conn)  # type: ignore[misc]


class _Reporting:
    """Mixed into a connection: reports its socket when it has connected and when it is used again."""

    wire: Callable[[], Wire | None]
    sock: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._report()

    def request(self, *args: Any, **kwargs: Any) -> Any:
        self._report()
        return super().request(*args, **kwargs)  # type: ignore[misc]

    def _report(self) -> None:
        wire, sock = self.wire(), _socket_of(self)
        if wire is not None and isinstance(sock, socket.socket):
            wire.hold(sock)


def _socket_of(connection: Any) -> Any:
    """The connection's socket. Through a proxy there is TLS inside TLS: the outer one is an attribute."""
    return getattr(connection.sock, "socket", connection.sock)
