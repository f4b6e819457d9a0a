"""A backend on a supervised engine: the same object across restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from admission.values import BackendLoad
from gateway.backends.port import (
    Absence,
    Backend,
    BackendState,
    Completion,
    DelegatingBackend,
    DeltaSink,
    EmbedPart,
    Vectors,
    Work,
)
from gateway.contracts.features import Feature
from observability.events import Distribution, EngineFigures
from resilience.failures import BackendFailure, FailureKind


class Totals:
    """The sums of the counters of the engines that have ended."""

    def __init__(self) -> None:
        self._ended: EngineFigures | None = None

    @property
    def preemptions(self) -> int:
        return self._ended.preemptions if self._ended is not None else 0

    def add(self, last: EngineFigures | None) -> None:
        """Add the last figures of an engine that has ended; ``None``: it had reported none."""
        if last is not None:
            self._ended = replace(self.on(last) or last, running=0, waiting=0, kv_usage=0.0, loras=None)

    def on(self, now: EngineFigures | None) -> EngineFigures | None:
        """The figures to show: those of the engine that runs, counters and histograms added up.

        ``now``: the running engine's figures; ``None`` while none runs.
        """
        ended = self._ended
        if now is None or ended is None:
            return now or ended
        return replace(
            now,
            prefix_queries=now.prefix_queries + ended.prefix_queries,
            prefix_hits=now.prefix_hits + ended.prefix_hits,
            preemptions=now.preemptions + ended.preemptions,
            prompt_tokens=_sum(now.prompt_tokens, ended.prompt_tokens),
            generation_tokens=_sum(now.generation_tokens, ended.generation_tokens),
            distributions=_joined(now.distributions, ended.distributions),
        )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None and other is None else (one or 0) + (other or 0)


def _joined(now: Sequence[Distribution], ended: Sequence[Distribution]) -> tuple[Distribution, ...]:
    """Add up histograms by bucket; both engines are of one kind and have the same histograms."""
    before = {kept.name: kept for kept in ended}
    joined = []
    for kept in now:
        old = before.get(kept.name)
        if old is not None:
            counts = tuple(map(sum, zip(kept.counts, old.counts, strict=True)))
            kept = replace(kept, counts=counts, total=kept.total + old.total)
        joined.append(kept)
    return tuple(joined)


if TYPE_CHECKING:
    from gateway.backends.supervised import SupervisedHost


class SupervisedBackend(DelegatingBackend):
    """Delegates to the running engine's backend; also a :class:`gateway.backends.port.Restarting`."""

    def __init__(
        self,
        name: str,
        host: SupervisedHost,
        more: frozenset[Feature] = frozenset(),
        without: frozenset[Feature] = frozenset(),
    ) -> None:
        self._name = name
        self._host = host
        self._more = more
        self._without = without

    @property
    def delegate(self) -> Backend:
        return self._host.inner(self._name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def features(self) -> frozenset[Feature]:
        return (self.delegate.features | self._more) - self._without

    @property
    def state(self) -> BackendState:
        return self._host.state

    @property
    def load(self) -> BackendLoad | None:
        """The engine's load as last reported; ``None`` while it takes no work."""
        return self.delegate.load if self._host.state is BackendState.READY else None

    @property
    def ready_in_s(self) -> float | None:
        return self._host.ready_in_s

    @property
    def absence(self) -> Absence:
        return self._host.absence(self._name)

    async def wait_ready(self, timeout_s: float) -> bool:
        return await self._host.wait_ready(timeout_s)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        with self._working():
            return await self.delegate.generate(work, out)

    async def embed(self, part: EmbedPart) -> Vectors:
        """Vectors of the engine that runs now; its death fails the call."""
        if self.state is BackendState.STARTING:
            raise BackendFailure(
                FailureKind.BACKEND_UNAVAILABLE, self.absence.reason, retry_after_s=self.ready_in_s
            )
        with self._working():
            return await super().embed(part)

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._host.check_ready(self._name)
        self._host.working()
        try:
            yield
        except BackendFailure as failure:
            if failure.kind is FailureKind.ENGINE_DEAD:
                self._host.notice_death()
            raise
