"""How a gate stands: its state, and what of it others may see. The decisions are in ``gate``."""

from __future__ import annotations

from collections.abc import Collection

from admission.circuit import Circuit
from admission.fair_queue import FairQueue
from admission.in_flight_work import InFlightWork
from admission.ladder import Ladders, Rung
from admission.ticket import AdmissionTicket, Hold
from admission.values import AdmissionLimits, BackendLoad


class GateState:
    """One gate's state.

    Attributes:
        limits: the thresholds of requests that bring none of their own.
        circuit: how many of the backend's answers failed.
        rates: how fast it has been seen to be.
        limit: how many sequences it should run, as learned.
        pace: how fast those in flight get their tokens.
        forecast: the memory that is reserved.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._line = FairQueue(aging_s=limits.aging_s)
        self._tickets: dict[int, AdmissionTicket] = {}  # of those in the line, in order of arrival
        self._hold: Hold | None = None
        self._flight = InFlightWork(limits)
        self._ladders = Ladders(limits.rungs)
        self.circuit = Circuit()
        self.rates = self._flight.experience.rates
        self.limit = self._flight.experience.limit
        self.pace = self._flight.experience.pace
        self.forecast = self._flight.memory.forecast

    @property
    def load(self) -> BackendLoad | None:
        """What the backend told last."""
        return self._flight.signals.load

    def silent_s(self, now: float) -> float:
        """How long the backend has told nothing new."""
        return self._flight.signals.silent_s(now)

    def rung(self, rungs: tuple[Rung, ...] | None = None) -> tuple[int, Rung]:
        """Where a new request would stand on the ladder of these rungs, by default on the gate's own.

        Returns:
            How many are climbed, and what the last of them says.
        """
        ladder = self._ladders.look(self.limits.rungs if rungs is None else rungs)
        climbed = ladder.climbed(self.depth)
        return climbed, ladder.rung(climbed)

    @property
    def factor(self) -> float:
        """Share of the sequences and blocks that is used."""
        return self._flight.scale

    @property
    def prefill_backlog(self) -> int:
        """Uncached prompt tokens handed on and without a first token."""
        return self._flight.prefill.total

    @property
    def waiting_tokens(self) -> int:
        """Uncached prompt tokens in the line."""
        return self._line.tokens

    @property
    def waiting_bytes(self) -> int:
        """Bytes that those in the line keep in memory."""
        return self._line.size_bytes

    def capacity(self, now: float) -> int:
        """Sequences that may be in flight now."""
        return self._flight.capacity(now)

    @property
    def in_flight(self) -> int:
        """Requests handed on and not released."""
        return len(self._flight.tickets)

    @property
    def sequences(self) -> int:
        """Sequences of those requests."""
        return self._flight.sequences

    @property
    def running(self) -> Collection[AdmissionTicket]:
        """Those handed on and not released, in order."""
        return self._flight.tickets.values()

    @property
    def waiting(self) -> Collection[AdmissionTicket]:
        """Those in the line, in order of arrival."""
        return self._tickets.values()

    @property
    def queued(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @property
    def hold(self) -> Hold | None:
        """What kept the next in line at the last look; nothing when nobody waits."""
        return self._hold if self._line else None

    @property
    def depth(self) -> int:
        """Requests that wait for each of the backend's engines, rounded down; with one engine all of them."""
        return self._waiting_in_all // self._flight.signals.workers

    @property
    def _waiting_in_all(self) -> int:
        """Here, and inside the backend those that did not come through here."""
        return len(self._tickets) + self._flight.foreign_waiting

    def queue_counts(self) -> dict[tuple[int, str], int]:
        """Waiting requests by class and tenant."""
        return self._line.counts()

    def usage(self, now: float) -> tuple[float, float]:
        """Share of the KV pool in use now, and at the fullest moment to come."""
        return self._flight.memory.usage(now)
