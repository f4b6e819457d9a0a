"""Notification of the request in progress on a connection that its caller has disconnected."""

from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

SCOPE_KEY: Final = "sluice.disconnect"


class ClientGone(Exception):
    """The caller has closed the connection."""


class ReaderTooSlow(ClientGone):
    """The caller has read nothing for :data:`gateway.http.disconnect_watch.STALL_S`; treated as gone."""


class ClientDisconnect:
    """The disconnect of one connection: calls ``listener``, set by one request at a time, with its kind.

    ``flow``, uvicorn's, tells whether writing is paused because the caller reads too slowly.
    """

    __slots__ = ("flow", "listener", "why")

    def __init__(self, flow: FlowControl | None = None) -> None:
        self.flow = flow
        self.why: type[ClientGone] | None = None
        self.listener: Callable[[type[ClientGone]], None] | None = None

    def set(self, why: type[ClientGone]) -> None:
        """Report that the caller has disconnected; only the first report counts."""
        if self.why is None:
            self.why = why
            if self.listener is not None:
                self.listener(why)
