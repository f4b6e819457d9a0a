"""Bounds on label values, so that no caller can grow the number of series."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from prometheus_client.metrics import MetricWrapperBase

# Values one label may take. Configured names are tens; what exceeds this is a mistake or an attack.
MAX_VALUES = 100
# Series one metric may have, over all its labels together. 2,000 series of a counter are about 200 KB a
# scrape.
MAX_SERIES = 2_000

M = TypeVar("M", bound=MetricWrapperBase)

NONE = "none"
OTHER = "other"


class Bounded:
    """Lets at most ``cap`` distinct values of a label through; all later ones are ``other``.

    Args:
        known: values that always have their place, whatever else was seen before.
        cap: how many distinct values pass.
    """

    def __init__(self, known: Iterable[str] = (), *, cap: int = MAX_VALUES) -> None:
        self._seen: set[str] = {*known, NONE, OTHER}
        self._cap = max(cap, len(self._seen))

    def __call__(self, value: str | None) -> str:
        """The value to use as a label; ``None`` and the empty text are ``none``."""
        if not value:
            return NONE
        if value in self._seen:
            return value
        if len(self._seen) >= self._cap:
            return OTHER
        self._seen.add(value)
        return value


class Series(Generic[M]):
    """The children of one metric, looked up once each; at most ``cap`` of them.

    Args:
        metric: the parent, with labels.
        bounds: one bound per label, in the metric's order.
        cap: how many children; beyond it every new combination is ``other`` in all labels.
    """

    def __init__(self, metric: M, *bounds: Bounded, cap: int = MAX_SERIES) -> None:
        self._metric = metric
        self._bounds = bounds
        self._cap = cap
        self._children: dict[tuple[str, ...], Any] = {}
        # Children by the values as they came; a shortcut for those that come again, bounded like the rest.
        self._met: dict[tuple[str | None, ...], Any] = {}

    def __call__(self, *values: str | None) -> M:
        """The child for these label values."""
        met: M | None = self._met.get(values)
        if met is not None:
            return met
        found = self._find(values)
        if len(self._met) < self._cap:
            self._met[values] = found
        return found

    def _find(self, values: tuple[str | None, ...]) -> M:
        key = tuple(bound(value) for bound, value in zip(self._bounds, values, strict=True))
        child = self._children.get(key)
        if child is None:
            if len(self._children) >= self._cap:
                key = (OTHER,) * len(self._bounds)
            child = self._children[key] = self._metric.labels(*key)
        found: M = child
        return found
