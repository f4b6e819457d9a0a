"""The door: who is inside, whether anyone may still come in, and a request's running notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from gateway.contracts.values import GenerateRequest
from gateway.errors import Draining, DuplicateRequest


class Reception:
    """Knows the requests in flight; refuses duplicates, and everything once draining."""

    def __init__(self) -> None:
        self._inside: set[tuple[str, str]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Requests between arrival and the last byte."""
        return len(self._inside)

    def close(self) -> None:
        """Take nothing new from here on."""
        self.draining = True

    def receive(self, request: GenerateRequest) -> AbstractContextManager[None]:
        """``with receive(request)``: holds a place for the request while the block runs.

        Entry raises:
            Draining: the gateway is stopping.
            DuplicateRequest: the tenant has a request of this id in flight.
        """
        return _Stay(self, (request.caller.tenant, request.request_id))

    async def drained(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()

    def _enter(self, place: tuple[str, str]) -> None:
        if self.draining:
            raise Draining("the gateway is stopping; send the request to another one", retry_after_ms=1000)
        if place in self._inside:
            raise DuplicateRequest("a request with this request_id is in flight", param="request_id")
        self._inside.add(place)
        self._empty.clear()

    def _leave(self, place: tuple[str, str]) -> None:
        self._inside.discard(place)
        if not self._inside:
            self._empty.set()


class _Stay(AbstractContextManager[None]):
    """One request's place; given back only when it was got."""

    __slots__ = ("_place", "_reception")

    def __init__(self, reception: Reception, place: tuple[str, str]) -> None:
        self._reception = reception
        self._place = place

    def __enter__(self) -> None:
        self._reception._enter(self._place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reception._leave(self._place)


class Laps:
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
