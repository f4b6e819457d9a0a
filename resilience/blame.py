"""Whether an adapter's weights or the backend are at fault when an output is not a number.

An adapter of finite weights may still compute NaN. If that counted against the backend, six requests of one
adapter would open the circuit for all callers; if it never did, a device that computes NaN for all would stay
in service. The results of other weights on the same backend at the same time decide.
"""

from collections.abc import Callable

WINDOW_S = 10.0
"""How long an answer or a failure counts: several times the 1.4 s of a whole answer (the P99 target)."""
MAX_WEIGHTS = 256  # weights (adapters, and the base model) stored per backend; the least recent are evicted


class Blame:
    """Stores recent results of each backend by weights: an adapter's id, or ``None`` for the base model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answered_at: dict[str, dict[str | None, float]] = {}
        self._nan_at: dict[str, dict[str | None, float]] = {}

    def answered(self, backend: str, adapter_id: str | None) -> None:
        self._note(self._answered_at.setdefault(backend, {}), adapter_id)

    def not_numbers(self, backend: str, adapter_id: str | None) -> bool:
        """Record a NaN of these weights; returns whether the adapter alone is at fault.

        It is, unless other weights gave NaN recently too and no other weights gave an answer. A NaN of the
        base model is always the backend's fault.
        """
        failed = self._nan_at.setdefault(backend, {})
        self._note(failed, adapter_id)
        if adapter_id is None:
            return False
        others_failed = self._others(failed, adapter_id)
        return not others_failed or self._others(self._answered_at.get(backend, {}), adapter_id)

    def _note(self, times: dict[str | None, float], adapter_id: str | None) -> None:
        times.pop(adapter_id, None)
        times[adapter_id] = self._clock()
        if len(times) > MAX_WEIGHTS:
            del times[next(iter(times))]

    def _others(self, times: dict[str | None, float], adapter_id: str) -> bool:
        since = self._clock() - WINDOW_S
        return any(at >= since for name, at in times.items() if name != adapter_id)
