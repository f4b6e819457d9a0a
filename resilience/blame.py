"""Whose numbers are wrong: an adapter's own weights', or the backend's.

An adapter of finite weights may still compute what is no number. If that counted against the backend, six of
its requests would open the circuit for everybody; if it never did, a device that computes nonsense for all
would stay in service. What tells them apart is how others do on the same backend at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

WINDOW_S = 10.0
"""How long an answer or a failure counts: a few times the 1.4 s that an answer takes at most (P99 target)."""
MAX_WEIGHTS = 256
"""Adapters that are told apart on one backend; beyond, those seen longest ago are forgotten."""


class Blame:
    """Remembers how the weights of each backend did lately. ``None`` stands for the base model alone.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._well: dict[str, dict[str | None, float]] = {}
        self._ill: dict[str, dict[str | None, float]] = {}

    def answered(self, backend: str, adapter_id: str | None) -> None:
        """An answer of these weights was made of numbers."""
        self._note(self._well.setdefault(backend, {}), adapter_id)

    def not_numbers(self, backend: str, adapter_id: str | None) -> bool:
        """One was not; whether the adapter alone is to blame.

        It is, unless others had the same lately and none of them was answered. The base model's weights are
        the backend's own.
        """
        ill = self._ill.setdefault(backend, {})
        self._note(ill, adapter_id)
        if adapter_id is None:
            return False
        others_ill = self._others(ill, adapter_id)
        return not others_ill or self._others(self._well.get(backend, {}), adapter_id)

    def _note(self, seen: dict[str | None, float], adapter_id: str | None) -> None:
        seen.pop(adapter_id, None)
        seen[adapter_id] = self._clock()
        if len(seen) > MAX_WEIGHTS:
            del seen[next(iter(seen))]

    def _others(self, seen: dict[str | None, float], adapter_id: str) -> bool:
        since = self._clock() - WINDOW_S
        return any(at >= since for name, at in seen.items() if name != adapter_id)
