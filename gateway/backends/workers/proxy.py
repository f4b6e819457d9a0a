"""Connections to a worker through an HTTP proxy, as tunnels (CONNECT)."""

import asyncio
import ssl
from dataclasses import dataclass, field

from gateway.backends.workers.connect import connect
from gateway.backends.workers.errors import ConnectFailed

MAX_HEAD_BYTES = 16 * 1024  # longest head of a proxy's answer, bytes


@dataclass(frozen=True, slots=True)
class Proxy:
    """Address and credentials of a proxy.

    Args:
        tls: for the connection to the proxy itself; ``None``: no TLS.
        authorization: the header line with its user and password; never logged.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    authorization: bytes = field(default=b"", repr=False)


async def connect_through(
    proxy: Proxy,
    protocol: asyncio.Protocol,
    where: tuple[str, int],
    tls: ssl.SSLContext | None,
    server_name: str | None,
) -> None:
    """Connect ``protocol`` to host and port ``where``; raises ConnectFailed, OSError and SSLError.

    The caller sets the time limit.
    """
    loop = asyncio.get_running_loop()
    opening = _Opening(loop.create_future())
    raw, _ = await connect(
        lambda: opening, proxy.host, proxy.port, proxy.tls, proxy.host if proxy.tls else None
    )
    host, port = where
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        request = f"CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n".encode()
        raw.write(request + proxy.authorization + b"\r\n")
        status = await opening.status
        if not 200 <= status < 300:
            hint = "; its user and password are wrong or missing" if status == 407 else ""
            raise ConnectFailed(f"the proxy answered {status}{hint}")
        transport: asyncio.BaseTransport | None = raw
        if tls is None:
            raw.set_protocol(protocol)
        else:
            transport = await loop.start_tls(raw, protocol, tls, server_hostname=server_name)
        if transport is None:
            raise ConnectFailed("the connection closed during the TLS handshake")
        protocol.connection_made(transport)
    except BaseException:
        raw.abort()
        raise


class _Opening(asyncio.Protocol):
    """Reads the head of the proxy's answer. The worker does not speak first, so nothing follows it."""

    def __init__(self, status: asyncio.Future[int]) -> None:
        self.status = status
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self.status.done() or (b"\r\n\r\n" not in self._head and len(self._head) <= MAX_HEAD_BYTES):
            return
        words = self._head.split(None, 2)
        if self._head.startswith(b"HTTP/1.") and len(words) > 1 and words[1].isdigit():
            self.status.set_result(int(words[1]))
        else:
            self.status.set_exception(ConnectFailed("the proxy does not answer in HTTP"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status.done():
            self.status.set_exception(ConnectFailed("the proxy closed the connection"))
