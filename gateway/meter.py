"""Counts what of an answer has gone out, and when."""

from __future__ import annotations

from collections.abc import Callable

from gateway.backends.port import Delta
from gateway.contracts.values import TokenLogprob
from gateway.ports import Sink


class Meter:
    """Stands between a backend and the sink: passes each piece on and keeps count.

    What it counted is true at any moment, so an answer that is cut short is billed for what was
    delivered and for nothing else.
    """

    __slots__ = (
        "_clock",
        "_logprobs",
        "_on_first",
        "_parts",
        "_sink",
        "cached_tokens",
        "first_at",
        "queue_wait_s",
        "started_at",
        "tokens",
    )

    def __init__(self, sink: Sink, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._parts: list[list[str]] = [[]]
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._on_first: Callable[[int | None], None] | None = None
        self.tokens = 0
        self.cached_tokens = 0
        self.queue_wait_s = 0.0
        self.started_at: float | None = None
        self.first_at: float | None = None

    async def take(self, delta: Delta) -> None:
        """Pass one piece on to the sink."""
        if self.first_at is None:
            self.first_at = self._clock()
            if self._on_first is not None:
                self._on_first(delta.cached_tokens)
        if delta.queue_wait_s is not None:
            self.queue_wait_s = delta.queue_wait_s
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        self.tokens += delta.tokens
        if delta.index >= len(self._parts):
            self._parts += [[] for _ in range(delta.index + 1 - len(self._parts))]
        self._parts[delta.index].append(delta.text)
        if delta.logprobs:
            self._logprobs.setdefault(delta.index, []).extend(delta.logprobs)
        await self._sink.delta(delta)

    def produced(self) -> int:
        """Tokens of the answer so far."""
        return self.tokens

    def started(self, on_first: Callable[[int | None], None] | None = None) -> None:
        """The work has been handed to a backend; ``on_first`` is told of the first piece's cached tokens."""
        self._on_first = on_first
        if self.started_at is None:
            self.started_at = self._clock()

    @property
    def delivered(self) -> bool:
        """Whether the caller has seen any of the answer."""
        return self.first_at is not None

    def text(self, index: int = 0) -> str:
        """One choice's text so far."""
        return "".join(self._parts[index]) if index < len(self._parts) else ""

    def logprobs(self, index: int = 0) -> tuple[TokenLogprob, ...]:
        """One choice's log-probabilities so far."""
        return tuple(self._logprobs.get(index, ()))
