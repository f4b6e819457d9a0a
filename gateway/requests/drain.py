"""Draining: not ready at once, new requests refused a little later, no request in flight in the end."""

from __future__ import annotations

import asyncio

from gateway.requests.in_flight import InFlightRequests


class Drain:
    """Begun by a signal or an operator; there is no way back.

    Between the first two steps new requests are still accepted: a load balancer learns at its next health
    check that it should send no more, and requests that arrive until then shall not be refused.

    Args:
        requests: the requests in flight.
        lame_duck_s: seconds between *not ready* and *no new requests*.
    """

    def __init__(self, requests: InFlightRequests, *, lame_duck_s: float) -> None:
        self._requests = requests
        self._lame_duck_s = lame_duck_s
        self._begun = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self._requests.in_flight

    @property
    def begun(self) -> bool:
        """Whether the drain has begun."""
        return self._begun.is_set()

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed.is_set()

    def begin(self) -> None:
        """Not ready from here on; idempotent."""
        self._requests.announce()
        self._begun.set()
        if not self._lame_duck_s:
            self._close()

    def cut(self) -> None:
        """Refuse new requests and end those in flight."""
        self._close()
        self._requests.cut()

    async def run(self) -> None:
        """Refuse new requests once the time for load balancers is over."""
        await self._begun.wait()
        await asyncio.sleep(self._lame_duck_s)
        self._close()

    async def emptied(self) -> None:
        """Wait until new requests are refused and none is in flight."""
        await self._closed.wait()
        await self._requests.drained()

    def _close(self) -> None:
        self._requests.close()
        self._closed.set()
