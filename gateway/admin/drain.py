"""The drain for operators: takes this process out of service."""

from dataclasses import dataclass

from typing_extensions import TypedDict

from gateway.requests.in_flight import InFlightRequests
from gateway.state.audit import Audit


class DrainBody(TypedDict):
    """Requests in flight, and whether new ones are refused."""

    draining: bool
    closed: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class DrainAdmin:
    """Begins the drain; only the first call is audited."""

    requests: InFlightRequests
    audit: Audit

    async def begin(self, who: str) -> DrainBody:
        if not self.requests.draining:
            self.requests.drain()
            await self.audit.record(who, "gateway.drain", "this process")
        return {"draining": True, "closed": self.requests.closed, "in_flight": self.requests.in_flight}
