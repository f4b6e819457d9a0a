"""The counters of an engine that restarts: they continue where the ended ones stopped."""

from collections.abc import Sequence
from dataclasses import replace
from operator import add

from msgspec import structs

from observability.events import Distribution, EngineFigures


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
            load = structs.replace(last.load, running=0, waiting=0, kv_usage=0.0)
            self._ended = replace(self.on(last) or last, load=load, loras=None)

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
    return tuple(
        replace(one, counts=tuple(map(add, one.counts, old.counts)), total=one.total + old.total)
        for one, old in zip(now, ended, strict=True)
    )
