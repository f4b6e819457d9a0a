"""Whether a backend's KV pool has room: its reported usage, and the forecast for the requests handed on."""

from collections.abc import Mapping

from admission.estimator import Estimator
from admission.forecast import KvForecast
from admission.signals import LoadSignals
from admission.ticket import AdmissionTicket
from admission.values import AdmissionLimits

# Maximum age of the counts of produced tokens in a forecast: about one step of a decoding GPU.
REFRESH_S = 0.02
CALM_S = 1.0  # the same while memory is not short


class KvMemory:
    """One backend's KV pool; ``tickets`` are the requests handed on, which the caller keeps up to date."""

    def __init__(
        self, signals: LoadSignals, estimator: Estimator, tickets: Mapping[int, AdmissionTicket]
    ) -> None:
        self._signals = signals
        self._estimator = estimator
        self._tickets = tickets
        self._refreshed_at = float("-inf")
        self.forecast = KvForecast()

    def usage(self, now: float) -> tuple[float, float]:
        """Share of the pool in use now, and at the forecast's peak."""
        self.refresh(now)
        used = self._signals.kv_usage(now, busy=bool(self._tickets))
        return used, self.forecast.usage(self._signals.pool, used=used)

    def holds(
        self, ticket: AdmissionTicket, limits: AdmissionLimits, used: float, now: float, *, scale: float
    ) -> bool:
        """Whether the request must wait for memory, of which ``used`` is in use; never while the pool's size
        is unknown. ``scale``: factor on the thresholds."""
        pool = self._signals.pool
        if not pool.tokens:
            return False
        pressure, watermark = limits.pressure_of(ticket.demand.priority)
        if used >= pressure * scale:
            return True
        watermark *= scale
        held = ticket.reserved
        # Slightly old counts are safe here: tokens produced since then are in `used` as if they were of other
        # callers, so they count twice.
        if now - self._refreshed_at >= CALM_S:
            self.refresh(now)
        if self.forecast.fits_surely(pool, watermark, used=used, extra=held):
            return False
        self.refresh(now)
        return not self.forecast.fits(pool, watermark, used=used, extra=held)

    def refresh(self, now: float) -> None:
        """Update the forecast's counts of produced tokens when they are at least ``REFRESH_S`` old."""
        if now - self._refreshed_at < REFRESH_S:
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
