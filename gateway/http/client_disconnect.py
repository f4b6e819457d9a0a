"""How the server notifies the request in progress on a connection of its caller's disconnect."""

from collections.abc import Callable
from typing import Final

SCOPE_KEY: Final = "sluice.disconnect"


class ClientGone(Exception):
    """The caller has closed the connection."""


class ReaderTooSlow(ClientGone):
    """The caller has read nothing for :data:`gateway.http.disconnect_watch.STALL_S`; treated as gone."""


class ClientDisconnect:
    """The disconnect of one connection, and its kind; one request at a time listens for it."""

    __slots__ = ("_listener", "why")

    def __init__(self) -> None:
        self.why: type[ClientGone] | None = None
        self._listener: Callable[[type[ClientGone]], None] | None = None

    def listen(self, listener: Callable[[type[ClientGone]], None]) -> None:
        """Call ``listener`` on the disconnect, until :meth:`forget`."""
        self._listener = listener

    def forget(self) -> None:
        """Remove the listener."""
        self._listener = None

    def set(self, why: type[ClientGone]) -> None:
        """The caller has disconnected; the first reason counts."""
        if self.why is None:
            self.why = why
            if self._listener is not None:
                self._listener(why)
