"""Connections to a host by its name."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

P = TypeVar("P", bound=asyncio.BaseProtocol)


async def connect(
    protocol: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None, server_name: str | None
) -> tuple[asyncio.Transport, P]:
    """Connect to the first of the host's IP addresses that accepts; raises the last one's OSError.

    ``server_name``: the name that the certificate must have. The caller sets the time limit.

    The name is looked up here and not by ``create_connection``: uvloop's does not cancel its own lookup with
    its caller, and logs "Future exception was never retrieved" if that lookup fails later.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left, (*_, address) in zip(reversed(range(len(found))), found, strict=True):
        try:
            return await loop.create_connection(
                protocol, str(address[0]), port, ssl=tls, server_hostname=server_name
            )
        except OSError:
            if not left:
                raise
    raise OSError("the name has no address")
