"""Leaving service: not ready at once, no new requests a little later, nobody inside in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.requests.in_flight import InFlightRequests
from gateway.state.audit import Audit


class Drain:
    """Begun by a signal or an operator; there is no way back.

    Between the two first steps new requests are still taken: a load balancer learns at its next health check
    that it should send no more, and who comes until then shall not be refused.

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
        """Requests inside."""
        return self._requests.in_flight

    @property
    def begun(self) -> bool:
        """Whether it is on its way out."""
        return self._begun.is_set()

    @property
    def closed(self) -> bool:
        """Whether nothing new is taken."""
        return self._closed.is_set()

    def begin(self) -> None:
        """Not ready from here on. Again, nothing more happens."""
        self._requests.announce()
        self._begun.set()
        if not self._lame_duck_s:
            self._close()

    def cut(self) -> None:
        """Nobody new, and whoever is inside is told that it is over."""
        self._close()
        self._requests.cut()

    async def run(self) -> None:
        """Take nothing new once the time for load balancers is over."""
        await self._begun.wait()
        await asyncio.sleep(self._lame_duck_s)
        self._close()

    async def emptied(self) -> None:
        """Wait until nobody comes any more and nobody is inside."""
        await self._closed.wait()
        await self._requests.drained()

    def _close(self) -> None:
        self._requests.close()
        self._closed.set()


class DrainAdmin:
    """What operators do about it.

    Args:
        drain: to begin.
        audit: keeps who did it.
    """

    def __init__(self, drain: Drain, audit: Audit) -> None:
        self._drain = drain
        self._audit = audit

    async def begin(self, who: str) -> Mapping[str, object]:
        """Begin, unless it has begun; how many are inside."""
        if not self._drain.begun:
            self._drain.begin()
            await self._audit.record(who, "gateway.drain", "this process")
        return {"draining": True, "closed": self._drain.closed, "in_flight": self._drain.in_flight}
