"""The requests in flight: duplicates are refused, and a drain waits for all of them or ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from gateway.contracts.values import GenerateRequest
from gateway.errors import Draining, DuplicateRequest

# The tenant, whether the caller labelled the request, and the label or the gateway's own id.
_Key = tuple[str, bool, str]


class InFlightRequests:
    """Knows the requests in flight; refuses duplicates, and after :meth:`close` every request.

    Attributes:
        draining: whether the gateway is stopping; requests are still taken until :meth:`close`.
    """

    def __init__(self) -> None:
        self._running: dict[_Key, _Running] = {}
        self._reporting = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests between arrival and the last byte."""
        return len(self._running) + self._reporting

    def announce(self) -> None:
        """The gateway is stopping; requests are still taken."""
        self.draining = True

    def close(self) -> None:
        """Refuse every further request."""
        self.draining = self._closed = True

    def cut(self) -> None:
        """End every request in flight now with the error ``draining``."""
        for running in tuple(self._running.values()):
            running.cut()

    def receive(self, request: GenerateRequest) -> AbstractContextManager[None]:
        """``with receive(request)``: the request is in flight while the block runs.

        Entry raises:
            Draining: the gateway is stopping.
            DuplicateRequest: the tenant has a request with this label in flight.

        The block raises Draining when :meth:`cut` ended it.
        """
        label = request.request_id if request.labelled else request.generation_id
        return _Running(self, (request.caller.tenant, request.labelled, label))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """``with reporting()``: a failed request is in flight until its error has been sent."""
        self._reporting += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._reporting -= 1
            self._set_when_empty()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self.in_flight:
            await self._empty.wait()

    def _enter(self, key: _Key, running: _Running) -> None:
        if self._closed:
            raise _draining()
        if key in self._running:
            raise DuplicateRequest("a request with this request_id is in flight", param="request_id")
        self._running[key] = running
        self._empty.clear()

    def _leave(self, key: _Key) -> None:
        del self._running[key]
        self._set_when_empty()

    def _set_when_empty(self) -> None:
        if not self.in_flight:
            self._empty.set()


class _Running(AbstractContextManager[None]):
    """One request's block; :meth:`cut` cancels it the way ``asyncio.timeout`` does."""

    __slots__ = ("_cancels_before", "_cut", "_key", "_requests", "_task")

    def __init__(self, requests: InFlightRequests, key: _Key) -> None:
        self._requests = requests
        self._key = key
        self._cut = False

    def cut(self) -> None:
        """End the block, once."""
        if not self._cut and self._task is not None:
            self._cut = True
            self._task.cancel()

    def __enter__(self) -> None:
        self._requests._enter(self._key, self)
        self._task = asyncio.current_task()
        self._cancels_before = 0 if self._task is None else self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests._leave(self._key)
        if self._cut and self._task is not None:
            others = self._task.uncancel() > self._cancels_before
            if kind is asyncio.CancelledError and not others:
                raise _draining() from None


def _draining() -> Draining:
    return Draining("the gateway is stopping; send the request to another one", retry_after_ms=1000)
