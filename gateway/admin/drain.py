"""Taking this process out of service, for operators."""

from typing_extensions import TypedDict

from gateway.requests.in_flight import InFlightRequests
from gateway.state.audit import Audit


class DrainBody(TypedDict):
    """Requests in flight, and whether new ones are refused."""

    draining: bool
    closed: bool
    in_flight: int


class DrainAdmin:
    """Begins the drain; the first order is audited."""

    def __init__(self, requests: InFlightRequests, audit: Audit) -> None:
        self._requests = requests
        self._audit = audit

    async def begin(self, who: str) -> DrainBody:
        if not self._requests.draining:
            self._requests.drain()
            await self._audit.record(who, "gateway.drain", "this process")
        return {"draining": True, "closed": self._requests.closed, "in_flight": self._requests.in_flight}
