"""The idle capacity of the engines, from the gates of admission."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from admission.gate import BackendGate


@dataclass(frozen=True, slots=True)
class IdleCapacity:
    """Leaves ``headroom``, a share of each engine, for requests of callers.

    ``gates``: those of the backends that have had a request.
    """

    gates: Callable[[], Mapping[str, BackendGate]]
    clock: Callable[[], float]
    headroom: float

    def room(self) -> int:
        """The number of requests that may start now without making a caller wait."""
        now, free = self.clock(), []
        for gate in self.gates().values():
            if gate.queued:
                return 0  # a caller or a batch's line already waits
            work = gate.work
            at_work = work.sequences + work.foreign
            most = max(1, int(work.capacity(now) * (1.0 - self.headroom)))
            _, peak = work.memory.usage(now)
            free.append(0 if at_work and peak > 1.0 - self.headroom else most - at_work)
        return max(0, *free) if free else 1

    def waiting(self) -> int:
        """The number of callers' requests that wait now."""
        queued = (ticket for gate in self.gates().values() for ticket in gate.tickets.values())
        return sum(ticket.demand.priority >= 0 for ticket in queued)
