"""How the server tells the request in progress on a connection that its caller is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SCOPE_KEY: Final = "sluice.departure"


class ClientGone(Exception):
    """The caller has closed the connection."""


class ReaderTooSlow(ClientGone):
    """The caller has taken no bytes for :data:`gateway.http.disconnect_watch.STALL_S`; as good as gone."""


class ClientDisconnect:
    """One connection's; one request at a time listens to it.

    Attributes:
        why: how the caller left; ``None`` while it is there.
    """

    __slots__ = ("_listener", "why")

    def __init__(self) -> None:
        self.why: type[ClientGone] | None = None
        self._listener: Callable[[type[ClientGone]], None] | None = None

    def listen(self, listener: Callable[[type[ClientGone]], None]) -> None:
        """Have ``listener`` called when the caller leaves, until :meth:`forget`."""
        self._listener = listener

    def forget(self) -> None:
        """Call nobody any more."""
        self._listener = None

    def left(self, why: type[ClientGone]) -> None:
        """The caller has left; the first word counts."""
        if self.why is None:
            self.why = why
            if self._listener is not None:
                self._listener(why)
