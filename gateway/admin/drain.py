"""Taking this process out of service, for operators."""

from typing_extensions import TypedDict

from gateway.requests.drain import Drain
from gateway.state.audit import Audit


class DrainBody(TypedDict):
    """Requests in flight, and whether new ones are refused."""

    draining: bool
    closed: bool
    in_flight: int


class DrainAdmin:
    """Begins the drain; the first order is audited."""

    def __init__(self, drain: Drain, audit: Audit) -> None:
        self._drain = drain
        self._audit = audit

    async def begin(self, who: str) -> DrainBody:
        """Begin, unless it has begun."""
        if not self._drain.begun:
            self._drain.begin()
            await self._audit.record(who, "gateway.drain", "this process")
        return {"draining": True, "closed": self._drain.closed, "in_flight": self._drain.in_flight}
