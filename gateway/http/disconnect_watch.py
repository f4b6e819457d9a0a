"""Cancels work whose caller has disconnected or reads nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Final

from msgspec import Struct
from starlette.types import Receive

from gateway.http.exchange import ClientDisconnect, ClientGone, Exchange
from resilience.task_groups import all_or_error

STALL_S: Final = 60.0  # longest time that one send may take; a slower reader would occupy a slot for nothing
_CHECKS_PER_STALL: Final = 4


Release = Callable[[], object]
"""Stops the watch: once the work is billed, a disconnect must not prevent that its answer is stored."""


def until_gone(
    exchange: Exchange, receive: Receive, *, stall_s: float = STALL_S
) -> AbstractAsyncContextManager[Release]:
    """Run the block; cancel it when the caller disconnects.

    Sluice's own server notifies the block. Under any other server, and for WebSockets, a task watches
    ``receive`` after the body.

    Raises ClientGone: the caller disconnected, or reads nothing, and the block was cancelled.
    """
    if exchange.disconnect is not None:
        return _ServerWatch(exchange.disconnect)
    return _watching(exchange, receive, stall_s)


class _ServerWatch(Struct, eq=False):
    """The watch under Sluice's own server; cancels the block as ``asyncio.timeout`` does, without a time."""

    _disconnect: ClientDisconnect
    _gone: bool = False
    _task: asyncio.Task[object] | None = None
    _cancels_before: int = 0

    async def __aenter__(self) -> Release:
        if self._disconnect.gone:
            raise ClientGone
        task = asyncio.current_task(asyncio.get_running_loop())
        assert task is not None
        self._task, self._cancels_before = task, task.cancelling()
        self._disconnect.listener = self._left
        return self._release

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect.listener = None
        if self._gone and self._task is not None:
            others = self._task.uncancel() > self._cancels_before
            if kind is asyncio.CancelledError and not others:
                raise ClientGone from None

    def _release(self) -> None:
        self._disconnect.listener = None

    def _left(self) -> None:
        self._gone = True
        if self._task is not None:
            self._task.cancel()


@asynccontextmanager
async def _watching(exchange: Exchange, receive: Receive, stall_s: float) -> AsyncIterator[Release]:
    """The watch under any other server: a task that reads ``receive``."""
    async with all_or_error() as group:
        watcher = group.create_task(_watch(exchange, receive, stall_s))
        try:
            yield watcher.cancel
        finally:
            watcher.cancel()


async def _watch(exchange: Exchange, receive: Receive, stall_s: float) -> None:
    """Wait for a disconnect, and raise it. One timer per quarter of ``stall_s`` replaces one per send."""
    while True:
        try:
            async with asyncio.timeout(stall_s / _CHECKS_PER_STALL):
                message = await receive()
        except TimeoutError:
            since = exchange.sending_since
            if since is not None and exchange.services.clock() - since >= stall_s:
                raise ClientGone from None
            continue
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            raise ClientGone
