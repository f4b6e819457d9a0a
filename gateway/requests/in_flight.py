"""The door: who is inside, whether anyone may still come in, and a request's running notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from gateway.contracts.values import GenerateRequest
from gateway.errors import Draining, DuplicateRequest

# The tenant, whether the caller labelled the request, and the label or the gateway's own id.
_Place = tuple[str, bool, str]


class InFlightRequests:
    """Knows the requests in flight; refuses duplicates, and everything once draining."""

    def __init__(self) -> None:
        self._inside: dict[_Place, _Stay] = {}
        self._telling = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests between arrival and the last byte."""
        return len(self._inside) + self._telling

    def announce(self) -> None:
        """On the way out, but whoever comes is still taken."""
        self.draining = True

    def close(self) -> None:
        """Take nothing new from here on."""
        self.draining = self._closed = True

    def cut(self) -> None:
        """The time is up: every request inside ends now, and its caller is told why."""
        for stay in tuple(self._inside.values()):
            stay.cut()

    def receive(self, request: GenerateRequest) -> AbstractContextManager[None]:
        """``with receive(request)``: holds a place for the request while the block runs.

        Entry raises:
            Draining: the gateway is stopping.
            DuplicateRequest: the tenant has a request with this label in flight.

        The block raises Draining when it was cut.
        """
        label = request.request_id if request.labelled else request.generation_id
        return _Stay(self, (request.caller.tenant, request.labelled, label))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """``with telling()``: one who has left with an error is in flight until it was told so."""
        self._telling += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._telling -= 1
            self._set_when_empty()

    async def drained(self) -> None:
        """Wait until nobody is inside, and nobody is still to be told why."""
        while self.in_flight:
            await self._empty.wait()

    def _enter(self, place: _Place, stay: _Stay) -> None:
        if self._closed:
            raise _draining()
        if place in self._inside:
            raise DuplicateRequest("a request with this request_id is in flight", param="request_id")
        self._inside[place] = stay
        self._empty.clear()

    def _leave(self, place: _Place) -> None:
        del self._inside[place]
        self._set_when_empty()

    def _set_when_empty(self) -> None:
        if not self.in_flight:
            self._empty.set()


class _Stay(AbstractContextManager[None]):
    """One request's place; given back only when it was got. Cutting works as ``asyncio.timeout`` does."""

    __slots__ = ("_cancels_before", "_cut", "_place", "_reception", "_task")

    def __init__(self, reception: InFlightRequests, place: _Place) -> None:
        self._reception = reception
        self._place = place
        self._cut = False

    def cut(self) -> None:
        """End the block, once."""
        if not self._cut and self._task is not None:
            self._cut = True
            self._task.cancel()

    def __enter__(self) -> None:
        self._reception._enter(self._place, self)
        self._task = asyncio.current_task()
        self._cancels_before = 0 if self._task is None else self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reception._leave(self._place)
        if self._cut and self._task is not None:
            others = self._task.uncancel() > self._cancels_before
            if kind is asyncio.CancelledError and not others:
                raise _draining() from None


def _draining() -> Draining:
    return Draining("the gateway is stopping; send the request to another one", retry_after_ms=1000)


class StageTimer:
    """How long each stage of one request took, in milliseconds, in order."""

    __slots__ = ("_clock", "_last", "stage_ms")

    def __init__(self, clock: Callable[[], float], arrived_at: float) -> None:
        self._clock = clock
        self._last = arrived_at
        self.stage_ms: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """The stage has ended."""
        now = self._clock()
        self.stage_ms[stage] = (now - self._last) * 1000
        self._last = now
