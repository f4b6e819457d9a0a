"""The prompts that a backend has been handed and has not yet computed."""

from __future__ import annotations

import heapq
import math


class PrefillBacklog:
    """Uncached prompt tokens handed on and without a first token.

    Each of the backend's engines computes them one by one; the first ones in order of hand-over are taken to
    be under way, one an engine. Every method costs the same however many there are, but for a logarithm.
    """

    __slots__ = (
        "_begun", "_begun_tokens", "_ends", "_next", "_since", "_total", "_whole", "_whole_tokens", "_workers"
    )  # fmt: skip

    def __init__(self) -> None:
        self._workers = 1
        # Tokens by ticket, in order of hand-over: under way, with the time since when; and after those.
        self._begun: dict[int, tuple[int, float]] = {}
        self._next: dict[int, int] = {}
        self._total = 0
        self._begun_tokens = 0
        # Of those under way: when each should be whole; tokens of those that should; others' times, summed.
        self._ends: list[tuple[float, int]] = []
        self._whole: set[int] = set()
        self._whole_tokens = 0
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def total(self) -> int:
        """Tokens of all of them, as if none had been begun."""
        return self._total

    def bound(self, workers: int, now: float, s_per_token: float) -> None:
        """So many engines work side by side."""
        self._workers = workers
        self._begin(now, s_per_token)

    def add(self, number: int, tokens: int, now: float, s_per_token: float) -> None:
        """A prompt was handed on."""
        self._next[number] = tokens
        self._total += tokens
        self._begin(now, s_per_token)

    def done(self, number: int, now: float, s_per_token: float) -> None:
        """It has its first token, or has ended without one. Raises KeyError for one that is not there."""
        if number not in self._begun:
            self._total -= self._next.pop(number)
            return
        tokens, since = self._begun.pop(number)
        self._total -= tokens
        self._begun_tokens -= tokens
        if number in self._whole:
            self._whole.remove(number)
            self._whole_tokens -= tokens
        else:
            self._since -= since
        if not self._begun:  # nothing of what was summed is left, rounding included
            self._since, self._ends = 0.0, []
        self._begin(now, s_per_token)

    def ahead(self, now: float, s_per_token: float) -> int:
        """Tokens that one engine must still compute before a new prompt's; none while an engine has none.

        Of those under way, only as many as the time since they began leaves.
        """
        if len(self._begun) < self._workers:
            return 0
        while self._ends and self._ends[0][0] <= now:
            _, number = heapq.heappop(self._ends)
            if number in self._begun and number not in self._whole:
                tokens, since = self._begun[number]
                self._whole.add(number)
                self._whole_tokens += tokens
                self._since -= since
        done = 0
        if s_per_token > 0.0:
            under_way = len(self._begun) - len(self._whole)
            done = self._whole_tokens + int((under_way * now - self._since) / s_per_token)
        return (self._total - min(self._begun_tokens, max(0, done))) // self._workers

    def _begin(self, now: float, s_per_token: float) -> None:
        while self._next and len(self._begun) < self._workers:
            number = next(iter(self._next))
            tokens = self._next.pop(number)
            self._begun[number] = (tokens, now)
            self._begun_tokens += tokens
            self._since += now
            ends_at = now + tokens * s_per_token if s_per_token > 0.0 else math.inf
            heapq.heappush(self._ends, (ends_at, number))
