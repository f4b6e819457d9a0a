"""Bounds on label values, so that no caller can grow the number of series."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics import MetricWrapperBase

# Most values of one label. There are tens of configured names; more values are a mistake or an attack.
MAX_VALUES = 100
# Most series of one metric, over all its labels together. 2,000 series of a counter are about 200 KB a
# scrape.
MAX_SERIES = 2_000

M = TypeVar("M", bound=MetricWrapperBase)

NONE = "none"
OTHER = "other"


class Bounded:
    """Allows at most ``cap`` distinct values of a label, and always the ``known`` ones; all others become
    ``other``.
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
    """The cached children of one metric, with one bound per label. Beyond ``cap`` children every new
    combination is ``other`` in all labels; a metric without labels is its own only child.
    """

    def __init__(self, metric: M, *bounds: Bounded, cap: int = MAX_SERIES) -> None:
        self._metric = metric
        self._bounds = bounds
        self._cap = cap
        self._children: dict[tuple[str, ...], M] = {}

    def __call__(self, *values: str | None) -> M:
        """The child for these label values."""
        key = tuple(bound(value) for bound, value in zip(self._bounds, values, strict=True))
        child = self._children.get(key)
        if child is None:
            if len(self._children) >= self._cap:
                key = (OTHER,) * len(self._bounds)
            child = self._children[key] = self._metric.labels(*key) if key else self._metric
        return child


def counted(registry: CollectorRegistry, name: str, text: str, **labels: Bounded) -> Series[Counter]:
    return Series(Counter(name, text, tuple(labels), registry=registry), *labels.values())
