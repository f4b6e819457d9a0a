"""The pool of keep-alive connections to one worker: bounded, one request at a time on each."""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from gateway.backends.workers.api_key import NO_KEY, ApiKey
from gateway.backends.workers.connect import connect
from gateway.backends.workers.connection import Connection
from gateway.backends.workers.errors import BadHttp, ConnectFailed, ConnectionLost, ConnectionsInUse
from gateway.backends.workers.proxy import Proxy, connect_through
from gateway.config.backends import OpenAIBackend
from gateway.contracts.sse import BYTE_ORDER_MARK
from resilience.time_limits import OnTime, TimeLimit, TimeLimits

T = TypeVar("T")

# Longest answer that is read whole, bytes (an error, a list of models, metrics of tens of kilobytes).
MAX_WHOLE_BYTES = 4 * 1024 * 1024
JSON = b"content-type: application/json\r\n"
MAX_LATE_S = 20.0  # the longest time by which a busy event loop extends the limit of a new connection


@dataclass(frozen=True, slots=True)
class Upload:
    """A request's body that is not in memory as a whole; ``pieces`` reads it from its start.

    ``answered_late``: the answer comes as a whole, so its first byte may take up to the total time limit.
    """

    content_type: bytes
    length: int
    pieces: Callable[[], AsyncGenerator[bytes | memoryview]]
    answered_late: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that was read whole."""

    status: int
    body: bytes

    def read(self, decode: Callable[[bytes], T]) -> T | None:
        """The body as ``decode`` reads it; ``None`` for a refusal, and a body that it cannot read."""
        try:
            return decode(self.body) if self.status == 200 else None
        except (ValueError, RecursionError):  # RecursionError: nested too deep
            return None


class WorkerClient:
    """Speaks HTTP/1.1 with one worker. Lives on one event loop.

    Args:
        base_url: such as ``http://host:8001/v1``; paths of the contract are appended to it.
        section: has the time limits of an exchange.
        max_connections: most connections open at once.
        connect_s: longest time to connect, seconds.
        key: sent with each request; never logged.
        context: TLS settings for ``https://``.
        proxy: connections are tunnelled through it.
    """

    def __init__(
        self,
        base_url: str,
        section: OpenAIBackend,
        *,
        max_connections: int,
        connect_s: float,
        key: ApiKey = NO_KEY,
        headers: tuple[tuple[str, str], ...] = (),
        context: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        self.base_url = base_url
        self._host = parts.hostname or ""
        self._tls = context if parts.scheme == "https" else None
        # The name that the certificate must have.
        self._server_name = (section.tls.server_name or self._host) if self._tls else None
        self._proxy = proxy
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        # Where the server's own paths are, such as /health: above the contract's /v1.
        self.root = self.prefix.removesuffix("/v1")
        first_s, total_s = section.first_token_timeout_seconds, section.total_timeout_seconds
        self._limits = first_s, section.idle_timeout_seconds, total_s
        self._keepalive_s = section.keepalive_seconds
        self._connect_s = connect_s
        self._max = max_connections
        self._key = key
        common = f"host: {parts.netloc}\r\nuser-agent: sluice\r\n"
        self._common = common.encode() + b"".join(f"{name}: {value}\r\n".encode() for name, value in headers)
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._opening = 0

    @property
    def open(self) -> int:
        return len(self._open)

    def heard_since(self, at: float) -> bool:
        """Whether the worker has sent a part of any answer since then, by the event loop's clock."""
        return any(connection.heard_since(at) for connection in self._open)

    def post(self, path: str, body: bytes | Upload, headers: bytes = b"") -> Awaitable[Connection]:
        """Send a request; returns its connection once the head of the answer has been received.

        ``headers`` are further header lines, each with its CRLF. A connection that was closed while idle is
        replaced by a new one, once. The caller releases the connection; a release before the answer's end
        closes it, which makes the worker stop. Raises TransportError.
        """
        path = self.prefix + path
        if isinstance(body, bytes):
            head = self._head(b"POST", path, headers + JSON, len(body))
            # Not joined: each request that waits for its answer would hold a copy of its body.
            return self._exchange((head, body), self._limits)
        head = self._head(b"POST", path, headers + b"content-type: %b\r\n" % body.content_type, body.length)
        first_s, idle_s, total_s = self._limits
        limits = total_s if body.answered_late else first_s, idle_s, total_s
        return self._exchange((head,), limits, body.pieces)

    async def get(self, path: str, *, timeout_s: float, body: bytes = b"") -> Whole:
        """Read a small answer, by POST with a body; ``path`` is from the root. Raises TransportError."""
        head = self._head(b"POST", path, JSON, len(body)) if body else self._head(b"GET", path)
        connection = await self._exchange((head + body,), (timeout_s,) * 3)
        try:
            return Whole(connection.status, await whole_body(connection))
        finally:
            connection.release()

    async def _exchange(
        self,
        request: tuple[bytes, ...],
        limits: tuple[float, float, float],
        rest: Callable[[], AsyncGenerator[bytes | memoryview]] | None = None,
    ) -> Connection:
        stale_before = asyncio.get_running_loop().time() - self._keepalive_s
        while self._idle and self._idle[0].idle_since < stale_before:
            self._idle.popleft().close()
        pooled = self._idle.pop() if self._idle else None  # the most recently used
        connection = pooled if pooled is not None else await self._connect()
        while True:
            try:
                connection.send(request, limits)
                if rest is not None:
                    await connection.send_more(rest())
                while not connection.head_done:
                    await connection.wait()
                if connection.header(b"content-encoding") not in ("", "identity"):
                    raise BadHttp("the answer is compressed, which was not asked for")
                return connection
            except ConnectionLost as error:
                connection.close()
                if connection is not pooled or not error.untouched:
                    raise
            except BaseException:
                connection.close()
                raise
            connection = await self._connect()

    def give_up(self, silent_s: float) -> None:
        """Fail the exchanges in which the worker has sent nothing for ``silent_s``."""
        for connection in tuple(self._open):
            connection.give_up(silent_s)

    def close(self) -> None:
        for connection in tuple(self._open):
            connection.close()
        self._idle.clear()

    def _head(self, method: bytes, path: str, headers: bytes = b"", length: int | None = None) -> bytes:
        ours = self._common + self._key.line
        end = b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length
        return b"%b %b HTTP/1.1\r\n%b%b%b" % (method, path.encode(), ours, headers, end)

    async def _connect(self) -> Connection:
        if len(self._open) + self._opening >= self._max:
            raise ConnectionsInUse(f"all {self._max} connections are in use")
        loop = asyncio.get_running_loop()
        connection = Connection(loop, made=self._open.add, free=self._idle.append, gone=self._forget)
        self._opening += 1
        on_time = OnTime(self._connect_s, self._connect_s + MAX_LATE_S)
        try:
            with TimeLimit(TimeLimits(), on_time.step_s, on_time):
                if self._proxy is not None:
                    where = (self._host, self._port)
                    await connect_through(self._proxy, connection, where, self._tls, self._server_name)
                else:
                    await connect(lambda: connection, self._host, self._port, self._tls, self._server_name)
        except BaseException as error:
            # It may have been made in this moment. uvloop then closes its transport without telling it.
            connection.close()
            if isinstance(error, TimeoutError):
                raise ConnectFailed(f"no connection within {self._connect_s:g} s") from error
            if isinstance(error, OSError):
                why = error.strerror or type(error).__name__
                raise ConnectFailed(f"no connection: {why}", refused=_refused(error)) from error
            raise
        finally:
            self._opening -= 1
        return connection

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


async def whole_body(connection: Connection, limit: int = MAX_WHOLE_BYTES) -> bytes:
    """The rest of an answer, without a byte order mark.

    Raises TransportError; BadHttp when it is longer than ``limit`` bytes.
    """
    pieces: list[bytes] = []
    size = 0
    while piece := await connection.read():
        size += len(piece)
        if size > limit:
            raise BadHttp(f"the answer is longer than {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces).removeprefix(BYTE_ORDER_MARK)


def _refused(error: OSError) -> bool:
    """Whether the worker's side refused, unlike an error here: too few descriptors, a failed name lookup."""
    return isinstance(error, ConnectionRefusedError)
