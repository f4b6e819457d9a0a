"""Whether a backend's KV pool has room: what it says of now, and the forecast of what is handed on."""

from __future__ import annotations

from admission.estimator import Estimator
from admission.forecast import KvForecast, ReservedTokens
from admission.signals import LoadSignals
from admission.ticket import AdmissionTicket
from admission.values import AdmissionLimits

# How old the counts of produced tokens in a forecast may be: about one step of a decoding GPU.
REFRESH_S = 0.02
# How old they may be where memory is not short.
CALM_S = 1.0


class KvMemory:
    """One backend's KV pool.

    Args:
        signals: what the backend tells.
        experience: how long answers become.
    """

    __slots__ = ("_experience", "_refreshed_at", "_signals", "_tickets", "forecast")

    def __init__(self, signals: LoadSignals, experience: Estimator) -> None:
        self._signals = signals
        self._experience = experience
        self._tickets: dict[int, AdmissionTicket] = {}
        self._refreshed_at = float("-inf")
        self.forecast = KvForecast()

    def add(self, ticket: AdmissionTicket) -> None:
        """Reserve what it will need."""
        self._tickets[ticket.number] = ticket
        self.forecast.add(ticket.number, _held(ticket))

    def remove(self, ticket: AdmissionTicket) -> None:
        """Give back what was reserved. Raises KeyError when that was done before."""
        del self._tickets[ticket.number]
        self.forecast.remove(ticket.number)

    def used(self, now: float) -> float:
        """Share of the pool in use, as far as is known."""
        return self._signals.kv_usage(now, busy=bool(self._tickets))

    def usage(self, now: float) -> tuple[float, float]:
        """Share of the pool in use now, and at the fullest moment to come."""
        self.refresh(now)
        used = self.used(now)
        return used, self.forecast.usage(self._signals.pool, used=used)

    def holds(
        self, ticket: AdmissionTicket, limits: AdmissionLimits, now: float, *, scale: float = 1.0
    ) -> bool:
        """Whether it must wait for memory; never where the pool's size is unknown.

        Args:
            scale: share of the thresholds that holds.
        """
        pool = self._signals.pool
        if not pool.tokens:
            return False
        used = self.used(now)
        pressure, watermark = limits.pressure_of(ticket.demand.priority)
        if used >= pressure * scale:
            return True
        watermark *= scale
        held = _held(ticket)
        # Counts that are a little old will do here: what was produced since is in `used`, as if it were
        # others', and so counts twice.
        self.refresh(now, CALM_S)
        if self.forecast.fits_surely(pool, watermark, used=used, extra=held):
            return False
        self.refresh(now)
        return not self.forecast.fits(pool, watermark, used=used, extra=held)

    def refresh(self, now: float, age_s: float = REFRESH_S) -> None:
        """Bring the forecast up to what the running ones have produced, when its counts are that old."""
        if now - self._refreshed_at < age_s:
            return
        self._refreshed_at = now
        for number, ticket in self._tickets.items():
            produced = ticket.demand.produced()
            held = self.forecast.get(number)
            if produced != held.produced:
                expected = held.expected
                if produced >= expected:
                    expected = self._experience.expect(ticket.demand, ticket.max_tokens, produced=produced)
                self.forecast.produced(number, produced, expected)
        self.forecast.sort()


def _held(ticket: AdmissionTicket) -> ReservedTokens:
    return ReservedTokens(ticket.uncached, ticket.expected, width=ticket.demand.sequences)
