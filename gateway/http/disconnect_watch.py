"""Whether the caller is still there: work ends when they leave or take no bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Final, Protocol, TypeVar

from starlette.types import Receive

from gateway.http.client_disconnect import ClientDisconnect, ClientGone, ReaderTooSlow
from gateway.http.exchange import Exchange

STALL_S: Final = 60.0
"""Longest time one send may take: a reader that takes nothing for a minute holds a slot for nobody."""
_LOOKS_PER_STALL: Final = 4

T = TypeVar("T")


class DisconnectWatch(Protocol):
    """The caller's presence while a block of work runs."""

    def release(self) -> None:
        """From here on the work ends even if the caller leaves: it is paid for and must be kept."""


def until_gone(
    exchange: Exchange, receive: Receive, clock: Callable[[], float], *, stall_s: float = STALL_S
) -> AbstractAsyncContextManager[DisconnectWatch]:
    """Run the block; cancel it as soon as the caller leaves.

    Our own server tells when that is; behind any other one (and for WebSockets) a task watches ``receive``,
    of which only the part behind the body is read. A single error is raised as itself, not in a group.

    Raises:
        ClientGone: the caller left, or takes no bytes, and the block was cancelled.
    """
    if exchange.departure is not None:
        return _Told(exchange.departure)
    return _watching(exchange, receive, clock, stall_s)


class _Told(AbstractAsyncContextManager[DisconnectWatch]):
    """The block is cancelled by the server's word. Works as ``asyncio.timeout`` does, without the time."""

    __slots__ = ("_cancels_before", "_departure", "_task", "_why")

    def __init__(self, departure: ClientDisconnect) -> None:
        self._departure = departure
        self._why: type[ClientGone] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        if self._departure.why is not None:
            raise self._departure.why
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancels_before = task.cancelling()
        self._departure.listen(self._left)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._departure.forget()
        if self._why is not None:
            others = self._task.uncancel() > self._cancels_before
            if kind is asyncio.CancelledError and not others:
                raise self._why from None

    def release(self) -> None:
        self._departure.forget()

    def _left(self, why: type[ClientGone]) -> None:
        self._why = why
        self._task.cancel()


class _Watcher:
    """Presence as a watching task sees it."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def release(self) -> None:
        self._task.cancel()


@asynccontextmanager
async def _watching(
    exchange: Exchange, receive: Receive, clock: Callable[[], float], stall_s: float
) -> AsyncIterator[DisconnectWatch]:
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(exchange, receive, clock, stall_s))
            try:
                yield _Watcher(watcher)
            finally:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        raise _single(errors) from None


async def run_until_gone(
    work: Awaitable[T], exchange: Exchange, receive: Receive, clock: Callable[[], float]
) -> T:
    """Await ``work`` under :func:`until_gone`."""
    async with until_gone(exchange, receive, clock):
        return await work


async def _watch(exchange: Exchange, receive: Receive, clock: Callable[[], float], stall_s: float) -> None:
    """Ends by raising; one timer in a quarter of the bound, instead of one per send."""
    while True:
        try:
            async with asyncio.timeout(stall_s / _LOOKS_PER_STALL):
                message = await receive()
        except TimeoutError:
            since = exchange.sending_since
            if since is not None and clock() - since >= stall_s:
                raise ReaderTooSlow from None
            continue
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            raise ClientGone


def _single(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error itself when there is one; an error of the work is told before the caller's leaving."""
    others = [error for error in errors.exceptions if not isinstance(error, ClientGone)]
    if not others:
        return errors.exceptions[0]
    return others[0] if len(others) == 1 else errors
