"""Whether a backend's KV pool has room: its reported usage, and the forecast for the requests handed on."""

from admission.estimator import Estimator
from admission.forecast import KvForecast
from admission.signals import LoadSignals
from admission.ticket import AdmissionTicket
from admission.values import AdmissionLimits

# Maximum age of the counts of produced tokens in a forecast: about one step of a decoding GPU.
REFRESH_S = 0.02
# The same while memory is not short.
CALM_S = 1.0


class KvMemory:
    """One backend's KV pool."""

    __slots__ = ("_estimator", "_refreshed_at", "_signals", "_tickets", "forecast")

    def __init__(self, signals: LoadSignals, estimator: Estimator) -> None:
        self._signals = signals
        self._estimator = estimator
        self._tickets: dict[int, AdmissionTicket] = {}
        self._refreshed_at = float("-inf")
        self.forecast = KvForecast()

    def add(self, ticket: AdmissionTicket) -> None:
        """Reserve the memory that the request will need."""
        self._tickets[ticket.number] = ticket
        self.forecast.add(ticket.number, ticket.reserved)

    def remove(self, ticket: AdmissionTicket) -> None:
        """Free the reservation. Raises KeyError when that was done before."""
        del self._tickets[ticket.number]
        self.forecast.remove(ticket.number)

    def used(self, now: float) -> float:
        """Share of the pool in use, as reported."""
        return self._signals.kv_usage(now, busy=bool(self._tickets))

    def usage(self, now: float) -> tuple[float, float]:
        """Share of the pool in use now, and at the forecast's peak."""
        self.refresh(now)
        used = self.used(now)
        return used, self.forecast.usage(self._signals.pool, used=used)

    def holds(
        self, ticket: AdmissionTicket, limits: AdmissionLimits, now: float, *, scale: float = 1.0
    ) -> bool:
        """Whether the request must wait for memory; never while the pool's size is unknown. ``scale``: factor
        on the thresholds."""
        pool = self._signals.pool
        if not pool.tokens:
            return False
        used = self._signals.kv_usage(now, busy=bool(self._tickets))
        pressure, watermark = limits.pressure_of(ticket.demand.priority)
        if used >= pressure * scale:
            return True
        watermark *= scale
        held = ticket.reserved
        # Slightly old counts are safe here: tokens produced since then are in `used` as if they were of other
        # callers, so they count twice.
        self.refresh(now, CALM_S)
        if self.forecast.fits_surely(pool, watermark, used=used, extra=held):
            return False
        self.refresh(now)
        return not self.forecast.fits(pool, watermark, used=used, extra=held)

    def refresh(self, now: float, age_s: float = REFRESH_S) -> None:
        """Update the forecast's counts of produced tokens when they are at least ``age_s`` old."""
        if now - self._refreshed_at < age_s:
            return
        self._refreshed_at = now
        for number, ticket in self._tickets.items():
            produced = ticket.demand.produced()
            held = self.forecast.get(number)
            if produced != held.produced:
                expected = held.expected
                if produced >= expected:
                    expected = self._estimator.expect(ticket.demand, ticket.max_tokens, produced=produced)
                self.forecast.produced(number, produced, expected)
        self.forecast.sort()
