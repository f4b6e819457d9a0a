"""uvicorn's HTTP protocol, which also tells the request in progress when its caller leaves.

ASGI has one way to learn that: a task of its own that waits in ``receive()``. Making and cancelling one for
each request costs more than all else that uvicorn does for it, and the protocol knows it anyway.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.departure import SCOPE_KEY, ClientGone, Departure, ReaderTooSlow
from gateway.http.presence import STALL_S


class GatewayProtocol(HttpToolsProtocol):
    """One connection. Puts its :class:`Departure` into the scope of each request.

    Attributes:
        stall_s: longest time, in seconds, that the caller may take no bytes while some wait for it.
    """

    stall_s: ClassVar[float] = STALL_S
    _departure: Departure
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """The caller is there."""
        super().connection_made(transport)
        self._departure = Departure()

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller has left."""
        super().connection_lost(exc)
        self._on_the_move()
        self._departure.left(ClientGone)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        cast("dict[str, object]", self.scope)[SCOPE_KEY] = self._departure

    def on_message_complete(self) -> None:
        """A request's body is here."""
        super().on_message_complete()
        if not self.pipeline:
            # A large body stops the reading, and who does not read does not see the caller leave.
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The caller takes no bytes."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.stall_s, self._departure.left, ReaderTooSlow)

    def resume_writing(self) -> None:
        """The caller takes bytes again."""
        super().resume_writing()
        self._on_the_move()

    def _on_the_move(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
