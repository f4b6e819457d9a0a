"""The state of one HTTP request at the edge: its ids, its caller, and the sending of its answer."""

import os
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct
from starlette.types import Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gateway.contracts.dialect import Header
from gateway.contracts.origin import EdgeRequest
from gateway.contracts.refusals import path_of
from gateway.contracts.values import Caller
from gateway.errors import Forbidden
from gateway.http.security import SECURITY_HEADERS
from gateway.keys.sessions import COOKIE
from gateway.ports import Services
from gateway.requests.body_memory import UNCOUNTED_BYTES
from observability.trace_context import parse_traceparent, usable_tracestate

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"

SCOPE_KEY: Final = "sluice.disconnect"  # the key of the connection's :class:`ClientDisconnect` in the scope
_SCOPE_KEY: Final = "sluice.exchange"
_SESSION: Final = COOKIE.encode()
# The key headers of Anthropic's and of Azure's clients.
_KEY_HEADERS: Final = (b"x-api-key", b"api-key")
_PRINTABLE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_is_plain = re.compile(r"[A-Za-z0-9_.-]*").fullmatch
MAX_REQUEST_ID: Final = 128  # longest ``x-request-id`` that is adopted, in characters


class ClientGone(Exception):
    """The caller has closed the connection, or has read nothing for so long that it is treated as gone."""


class ClientDisconnect(Struct, eq=False):
    """The disconnect of one connection: calls ``listener``, set by one request at a time.

    ``flow``, uvicorn's, tells whether writing is paused because the caller reads too slowly; ``write`` is the
    transport's, ``begin`` the protocol's.
    """

    flow: FlowControl | None = None
    write: Callable[[bytes], object] | None = None
    begin: Callable[[int, Iterable[Header], bytes, bool], bool] | None = None
    gone: bool = False
    listener: Callable[[], None] | None = None

    def set(self) -> None:
        """Report that the caller has disconnected; only the first report counts."""
        if not self.gone:
            self.gone = True
            if self.listener is not None:
                self.listener()


class Reply(Struct, frozen=True):
    """A whole HTTP answer, ready to send; ``keep``: it may be stored for repeated requests."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: tuple[Header, ...] = ()
    keep: bool = True


class Exchange(EdgeRequest, eq=False, kw_only=True):
    """The edge's state of one request, and the way to answer it.

    ``request_id`` is the header's or a new one, and the body's once that is parsed. ``sending_since`` is when
    the send in progress began: a client that reads nothing is noticed without a timer per send.
    ``disconnect`` is given if the server itself reports the caller's disconnect. ``reported``: a journey
    reports the request's outcome; if not, the edge does.
    ``is_anthropic``: the client uses Anthropic's contract.
    """

    raw_send: Send
    services: Services
    # Of a repeated header only the last value counts.
    headers: dict[bytes, bytes]
    address: str
    disconnect: ClientDisconnect | None
    # Called when the answer begins, so that the headers report the key's limits at that time.
    limit_headers: Callable[[], Awaitable[Sequence[Header]]] | None = None
    reported: bool = False
    started: bool = False
    client_gone: bool = False
    sending_since: float | None = None
    held_bytes: int = 0
    held_by: str = ""
    is_anthropic: bool = False

    @staticmethod
    def open(scope: Scope, send: Send, services: Services) -> "Exchange":
        """Create the exchange of a request that has just arrived, and store it for :meth:`of`."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path: str = scope.get("path", "")
        traceparent, label = headers.get(b"traceparent"), headers.get(b"x-request-id")
        tracestate = headers.get(b"tracestate")
        if traceparent is not None and len(headers) < len(scope["headers"]):  # one of the headers is repeated
            traceparent, tracestate = _repeated_context(scope["headers"])
        given = "" if traceparent is None else traceparent.decode("latin-1").strip()
        parent = parse_traceparent(given) if given else None
        exchange = scope[_SCOPE_KEY] = Exchange(
            raw_send=send,
            services=services,
            arrived_at=services.clock(),
            headers=headers,
            address=(scope.get("client") or ("",))[0],
            method=scope.get("method", "WS"),
            disconnect=scope.get(SCOPE_KEY),
            request_id=(label and usable_request_id(label)) or services.new_id("req"),
            trace_id=os.urandom(16).hex() if parent is None else parent.trace_id,
            is_anthropic=path.startswith("/v1/messages")
            or (b"anthropic-version" in headers and path.startswith("/v1/models")),
        )
        if parent is not None:
            exchange.trace_parent = given
            exchange.trace_state = usable_tracestate(tracestate)
        return exchange

    @staticmethod
    def of(scope: Scope) -> "Exchange":
        """The exchange that the middleware made for this scope."""
        exchange: Exchange = scope[_SCOPE_KEY]
        return exchange

    def hold_body(self, size: int) -> None:
        """Count the body, of which ``size`` bytes have arrived, until the request ends.

        Raises TooManyBodies, RateLimited: the bodies in memory have reached a limit.
        """
        if size <= UNCOUNTED_BYTES or size <= self.held_bytes:
            return
        if not self.held_bytes:
            self.held_by = "" if self.caller is None else self.caller.tenant
        self.services.bodies.hold(self.held_by, size - self.held_bytes)
        self.held_bytes = size

    def end(self, scope: Scope) -> None:
        """End the request: release its body and break the reference cycle of scope and exchange."""
        if self.held_bytes:
            self.services.bodies.release(self.held_by, self.held_bytes)
            self.held_bytes = 0
        scope.pop(_SCOPE_KEY, None)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send one ASGI message; after a disconnect nothing is sent and nothing raised."""
        if self.client_gone:
            return
        self.sending_since = self.services.clock()
        try:
            await self.raw_send(message)
        except OSError:
            # The server reports a closed connection this way; the disconnect watch acts on it.
            self.client_gone = True
        finally:
            self.sending_since = None

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Send the status and the headers, with those for the ids and limits."""
        head = await self._head(status, headers)
        await self.send({"type": "http.response.start", "status": status, "headers": head})

    async def begin(self, status: int, headers: Iterable[Header], data: bytes, *, more: bool) -> None:
        """Send the status, the headers and the first piece of the body, under our server in one write.

        Without ``more``, ``data`` is the whole body, and the headers have its length.
        """
        head = await self._head(status, headers)
        connection = self.disconnect
        if connection is None or connection.begin is None or not connection.begin(status, head, data, more):
            await self.send({"type": "http.response.start", "status": status, "headers": head})
            await self.body(data, more=more)

    async def _head(self, status: int, headers: Iterable[Header]) -> list[Header]:
        limits = () if self.limit_headers is None else await self.limit_headers()
        self.started = True
        self.status = status
        return [*headers, *self.id_headers(), *limits]

    def write(self, data: bytes) -> bool:
        """Send a piece of a body without ``content-length``, which is not empty, as one chunk at once.

        Returns ``False`` if the caller reads too slowly, or under any other server: then nothing was sent.
        """
        connection = self.disconnect
        if connection is None or connection.write is None:
            return False
        if connection.flow is None or connection.flow.write_paused:
            return False
        if not connection.gone:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    @property
    def waits_first(self) -> bool:
        """Whether a cancelled send has sent nothing: our server waits for a slow reader before it writes."""
        if self.disconnect is not None:
            return self.disconnect.write is not None
        return isinstance(getattr(self.raw_send, "__self__", None), WebSocketsSansIOProtocol)

    def body(self, data: bytes, *, more: bool) -> Awaitable[None]:
        return self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer; with status 204, without the headers that describe a body."""
        length = (b"content-length", str(len(reply.body)).encode())
        about = [] if reply.status == 204 else [(b"content-type", reply.content_type), length]
        await self.begin(reply.status, (*about, *reply.headers), reply.body, more=False)

    def id_headers(self) -> list[Header]:
        request_id = self.request_id
        shown = request_id if _is_plain(request_id) else quote(request_id, safe=_PRINTABLE)
        shared = [
            (b"x-request-id", shown.encode()),
            (b"x-trace-id", self.trace_id.encode()),
            *SECURITY_HEADERS,
        ]
        return [(b"request-id", shown.encode()), *shared] if self.is_anthropic else shared

    @property
    def known_caller(self) -> Caller:
        """The caller, after its key was checked."""
        assert self.caller is not None
        return self.caller

    @property
    def tenant(self) -> str:
        return self.known_caller.tenant

    @property
    def who(self) -> str:
        """The id of the caller's key, for the audit log."""
        return self.known_caller.key_id

    @property
    def key(self) -> str | None:
        """The key of ``Authorization: Bearer KEY``, else of ``x-api-key`` or ``api-key``."""
        scheme, _, key = self.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and (key := key.strip()):
            return key.decode("latin-1")
        keys = map(self.headers.get, _KEY_HEADERS)
        return next((one.decode("latin-1").strip() for one in keys if one and one.strip()), None)

    @property
    def session(self) -> str | None:
        """The token in the console's session cookie."""
        cookies = self.headers.get(b"cookie")
        if cookies is None or _SESSION not in cookies:
            return None
        named = (one.strip().partition(b"=") for one in cookies.split(b";"))
        return next((value.decode("latin-1") for name, _, value in named if name == _SESSION), None)

    @property
    def reads(self) -> bool:
        return self.method in ("GET", "HEAD")

    def check_origin(self) -> None:
        """Refuse a cookie-authenticated request from a page of another origin. Raises Forbidden."""
        origin, host = self.headers.get(b"origin"), self.headers.get(b"host", b"")
        site = self.headers.get(b"sec-fetch-site", b"same-origin")
        foreign = origin is not None and origin.partition(b"://")[2] != host
        if foreign or site not in (b"same-origin", b"none") or (origin is None and not self.reads):
            raise Forbidden("a session is only for the console's own page")

    def check_page(self, origins: Sequence[str]) -> None:
        """Refuse a request without a key from a page whose origin is not in ``origins``. Raises Forbidden.

        If keys are off, any page in a browser on this machine could otherwise change the gateway: a POST
        with a body of text needs no preflight. A browser sends ``origin`` with it; other clients do not.
        """
        origin = self.headers.get(b"origin")
        if origin is None or origin.partition(b"://")[2] == self.headers.get(b"host"):
            return
        page = origin.decode("latin-1")
        if "*" not in origins and page not in origins:
            raise Forbidden(
                f"the header origin is '{path_of([page])}' and no key was sent; allowed: a key,"
                " this gateway's own pages, those of server.cors_origins",
                param="origin",
            )


def usable_request_id(header: bytes) -> str | None:
    """The caller's ``x-request-id`` when it is 1 to 128 printable ASCII characters, else ``None``."""
    if len(header) > MAX_REQUEST_ID:
        return None
    text = header.decode("latin-1").strip()
    return text if text and text.isascii() and text.isprintable() else None


def _repeated_context(headers: Iterable[Header]) -> tuple[bytes | None, bytes | None]:
    """``traceparent``, which counts only if it is sent once, and ``tracestate``, whose values are one list
    (W3C Trace Context §3.3).
    """
    parents = [value for name, value in headers if name == b"traceparent"]
    states = [value for name, value in headers if name == b"tracestate"]
    return parents[0] if len(parents) == 1 else None, b",".join(states)
