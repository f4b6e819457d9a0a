"""The requests in flight: duplicates are refused, and a drain waits for all of them or ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

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
        self._tasks: dict[_Key, asyncio.Task[object] | None] = {}
        self._cut: set[_Key] = set()
        self._reporting = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests between arrival and the last byte."""
        return len(self._tasks) + self._reporting

    def announce(self) -> None:
        """The gateway is stopping; requests are still taken."""
        self.draining = True

    def close(self) -> None:
        """Refuse every further request."""
        self.draining = self._closed = True

    def cut(self) -> None:
        """End every request in flight now with the error ``draining``; cancels each once."""
        for key, task in self._tasks.items():
            if task is not None and key not in self._cut:
                self._cut.add(key)
                task.cancel()

    @contextmanager
    def receive(self, request: GenerateRequest) -> Iterator[None]:
        """``with receive(request)``: the request is in flight while the block runs.

        Raises:
            Draining: on entry, the gateway is stopping; from the block, :meth:`cut` ended it.
            DuplicateRequest: on entry, the tenant has a request with this label in flight.
        """
        label = request.request_id if request.labelled else request.generation_id
        key = (request.caller.tenant, request.labelled, label)
        if self._closed:
            raise _draining()
        if key in self._tasks:
            raise DuplicateRequest("a request with this request_id is in flight", param="request_id")
        task = asyncio.current_task()
        cancels_before = 0 if task is None else task.cancelling()
        self._tasks[key] = task
        self._empty.clear()
        cancelled: asyncio.CancelledError | None = None
        try:
            yield
        except asyncio.CancelledError as error:
            cancelled = error
            raise
        finally:
            del self._tasks[key]
            self._set_when_empty()
            # As asyncio.timeout does it: a cancellation of its own becomes an error, any other stays.
            if key in self._cut and task is not None:
                self._cut.discard(key)
                others = task.uncancel() > cancels_before
                if cancelled is not None and not others:
                    raise _draining() from None

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

    def _set_when_empty(self) -> None:
        if not self.in_flight:
            self._empty.set()


def _draining() -> Draining:
    return Draining("the gateway is stopping; send the request to another one", retry_after_ms=1000)
