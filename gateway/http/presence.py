"""Whether the caller is still there: work ends when they leave or take no bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from starlette.types import Receive

from gateway.http.exchange import Exchange

STALL_S: Final = 60.0
"""Longest time one send may take: a reader that takes nothing for a minute holds a slot for nobody."""
_LOOKS_PER_STALL: Final = 4

T = TypeVar("T")


class ClientGone(Exception):
    """The caller has closed the connection."""


class ReaderTooSlow(ClientGone):
    """The caller has taken no bytes for :data:`STALL_S`; as good as gone."""


class Presence:
    """The caller's presence while a block of work runs."""

    def __init__(self, watcher: asyncio.Task[None]) -> None:
        self._watcher = watcher

    def release(self) -> None:
        """From here on the work ends even if the caller leaves: it is paid for and must be kept."""
        self._watcher.cancel()


@asynccontextmanager
async def until_gone(
    exchange: Exchange, receive: Receive, clock: Callable[[], float], *, stall_s: float = STALL_S
) -> AsyncIterator[Presence]:
    """Run the block; cancel it as soon as the caller leaves.

    Only the part of ``receive`` behind the body is read. A single error is raised as itself, not in a group.

    Raises:
        ClientGone: the caller left, or takes no bytes, and the block was cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(exchange, receive, clock, stall_s))
            try:
                yield Presence(watcher)
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
