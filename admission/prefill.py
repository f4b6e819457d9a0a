"""The prompts handed to a backend and not yet computed."""

import heapq
import math


class PrefillBacklog:
    """Uncached prompt tokens of requests that were handed on and have no first token yet.

    Each engine computes one prompt at a time; the first ones in order of hand-over are taken to be in
    progress, one per engine. Every method takes logarithmic time.
    """

    __slots__ = (
        "_begun", "_begun_tokens", "_ends", "_next", "_since", "_whole", "_whole_tokens", "_workers", "total"
    )  # fmt: skip

    def __init__(self) -> None:
        self._workers = 1
        # By ticket, in order of hand-over: (tokens, start) of prompts in progress; tokens of the next ones.
        self._begun: dict[int, tuple[int, float]] = {}
        self._next: dict[int, int] = {}
        # Tokens of all prompts, those in progress in full.
        self.total = 0
        self._begun_tokens = 0
        # Prompts in progress: (expected end, ticket); those past it, with their tokens; sum of other starts.
        self._ends: list[tuple[float, int]] = []
        self._whole: set[int] = set()
        self._whole_tokens = 0
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self._begun)

    def bound(self, workers: int, now: float, s_per_token: float) -> None:
        """Set the number of engines."""
        self._workers = workers
        self._begin(now, s_per_token)

    def add(self, number: int, tokens: int, now: float, s_per_token: float) -> None:
        """Add a prompt that was handed on."""
        self._next[number] = tokens
        self.total += tokens
        self._begin(now, s_per_token)

    def done(self, number: int, now: float, s_per_token: float) -> None:
        """Remove a prompt that has its first token or has ended. Raises KeyError for an unknown one."""
        if number not in self._begun:
            self.total -= self._next.pop(number)
            return
        tokens, since = self._begun.pop(number)
        self.total -= tokens
        self._begun_tokens -= tokens
        if number in self._whole:
            self._whole.remove(number)
            self._whole_tokens -= tokens
        else:
            self._since -= since
        if not self._begun:  # resets the sums, rounding errors included
            self._since, self._ends = 0.0, []
        self._begin(now, s_per_token)

    def ahead(self, now: float, s_per_token: float) -> int:
        """Tokens that one engine must compute before a new prompt's; 0 while an engine is free.

        Tokens of prompts in progress that should be computed by now are subtracted.
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
        return (self.total - min(self._begun_tokens, max(0, done))) // self._workers

    def _begin(self, now: float, s_per_token: float) -> None:
        while self._next and len(self._begun) < self._workers:
            number = next(iter(self._next))
            tokens = self._next.pop(number)
            self._begun[number] = (tokens, now)
            self._begun_tokens += tokens
            self._since += now
            ends_at = now + tokens * s_per_token if s_per_token > 0.0 else math.inf
            heapq.heappush(self._ends, (ends_at, number))
