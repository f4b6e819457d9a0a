"""Fetches images for requests, so that workers need not.

A host name is resolved once, each of its IP addresses must be allowed, and the connection goes to one of
them, so that a changed DNS answer cannot redirect it. Redirects are checked the same way. No proxy, cookie or
credential is used, and compressed answers are not decompressed.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Final

from gateway.backends.workers.connection import Connection
from gateway.backends.workers.errors import TransportError
from gateway.config.images import ImagesSection
from gateway.errors import RateLimited
from gateway.images.address import BadAddress, ImageAddress, parse_address, reachable, redirected

MAX_REDIRECTS: Final = 3
MAX_RUNNING: Final = 64  # most concurrent fetches; a tenant may have half of them, and as many waiting ones
CONNECT_S: Final = 3.0  # longest time to connect to one of a host's addresses, in seconds
RETRY_AFTER_MS: Final = 1_000
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
Hold = Callable[[int], None]  # counts bytes that a request keeps in memory; raises if they exceed the limit


class NameLookup:
    """Resolves host names in its own threads, so that a slow DNS server delays nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_RUNNING, "image-names")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the IP addresses of a host; none if it is unknown."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            return ()
        return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


class ImageFetcher:
    """Fetches over HTTP/1.1, with one connection per image.

    ``tls``: for ``https://``; the certificate must match the host's name, not the IP address.
    """

    def __init__(self, bounds: ImagesSection, *, look_up: LookUp, tls: ssl.SSLContext) -> None:
        self._bounds = bounds
        self._look_up = look_up
        self._tls = tls
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._asked: Counter[str] = Counter()

    async def fetch(self, url: str, tenant: str, hold: Hold) -> bytes:
        """Fetch an image's bytes. Raises BadAddress, RateLimited, and the errors of ``hold``."""
        limit_s = self._bounds.fetch_timeout_seconds
        address = parse_address(url, self._bounds.fetch_hosts)
        async with self._turn(tenant):
            try:
                async with asyncio.timeout(limit_s):
                    return await self._follow(address, hold)
            except TimeoutError:
                raise BadAddress(
                    f"did not come within {limit_s:g} s", "an address that answers in time"
                ) from None
            except (TransportError, OSError):
                raise BadAddress("could not be fetched: no answer", "an address that answers") from None

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        share = MAX_RUNNING // 2
        if self._asked[tenant] >= 2 * share:
            raise RateLimited(
                f"{self._asked[tenant]} images of this tenant are being fetched",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._asked[tenant] += 1
        try:
            async with self._own.setdefault(tenant, asyncio.Semaphore(share)), self._running:
                yield
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant], self._own[tenant]

    async def _follow(self, address: ImageAddress, hold: Hold) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            connection = await self._connect(address)
            try:
                connection.send((_request(address),), (_NEVER_S, _NEVER_S, _NEVER_S))
                while not connection.head_done:
                    await connection.wait()
                status, location = connection.status, connection.header(b"location")
                if status == 200:
                    return await self._body(connection, hold)
                if status not in _REDIRECTS or not location:
                    raise BadAddress(
                        f"could not be fetched: the server answered {status}", "an address of an image"
                    )
                address = redirected(address, location, self._bounds.fetch_hosts)
            finally:
                connection.close()
        raise BadAddress(f"leads to more than {MAX_REDIRECTS} others", f"{MAX_REDIRECTS} redirects or fewer")

    async def _connect(self, address: ImageAddress) -> Connection:
        """Connect to one of the host's checked IP addresses. Raises OSError if none answers."""
        loop = asyncio.get_running_loop()
        found = reachable(await self._look_up(address.host, address.port), self._bounds.fetch_networks)
        secure = address.scheme == "https"
        for one in found:
            connection = Connection(loop, made=_nothing, free=_nothing, gone=_nothing)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await loop.create_connection(
                        lambda: connection,  # noqa: B023 - called before the next round
                        one,
                        address.port,
                        ssl=self._tls if secure else None,
                        server_hostname=address.host if secure else None,
                    )
                return connection
            except (OSError, TimeoutError):
                connection.close()
        raise OSError

    async def _body(self, connection: Connection, hold: Hold) -> bytes:
        data = BytesIO()  # getvalue() does not copy
        size = 0
        while piece := await connection.read():
            size += len(piece)
            if size > self._bounds.max_bytes:
                raise BadAddress("is too large", f"{self._bounds.max_bytes} bytes or fewer")
            hold(len(piece))
            data.write(piece)
        return data.getvalue()


_NEVER_S: Final = 3_600.0  # no timeout here: the whole fetch has its own


def _nothing(connection: Connection) -> None:
    """Do nothing: the connection is not reused."""


def _request(address: ImageAddress) -> bytes:
    head = (
        f"GET {address.target} HTTP/1.1\r\nhost: {address.host_header}\r\nuser-agent: sluice\r\n"
        "accept: image/*\r\naccept-encoding: identity\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii")
