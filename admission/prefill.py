"""The prompts handed to a backend and not yet computed."""

import heapq
import math
from typing import Final

# A pool's prompt that is so late while a later one was computed is on an engine that hangs, seconds.
OVERTAKEN_S: Final = 5.0


class PrefillBacklog:
    """Uncached prompt tokens of requests that were handed on and have no first token yet.

    Each engine computes one prompt at a time; the first ones in order of hand-over are taken to be in
    progress, one per engine. Every method takes logarithmic time.
    """

    def __init__(self) -> None:
        self._workers = 1
        # By ticket, in order of hand-over: (tokens, start) of prompts in progress; tokens of the next ones.
        self._in_progress: dict[int, tuple[int, float]] = {}
        self._next: dict[int, int] = {}
        # Tokens of all prompts, those in progress in full.
        self.total = 0
        self._in_progress_tokens = 0
        # Prompts in progress: (expected end, ticket); those past it, with their tokens; sum of other starts.
        self._ends: list[tuple[float, int]] = []
        self._overdue: set[int] = set()
        self._overdue_tokens = 0
        self._starts_sum = 0.0
        # When each prompt was handed on; of those computed, the last time; prompts of engines that hang.
        self._handed_on: dict[int, float] = {}
        self._computed_to = -math.inf
        self._given_up: set[int] = set()

    def set_engines(self, workers: int, now: float, s_per_token: float) -> None:
        self._workers = workers
        self._begin(now, s_per_token)

    def add(self, number: int, tokens: int, now: float, s_per_token: float) -> None:
        self._next[number] = tokens
        self._handed_on[number] = now
        self.total += tokens
        self._begin(now, s_per_token)

    def done(self, number: int, now: float, s_per_token: float, *, computed: bool = False) -> None:
        """Remove a prompt that is ``computed`` or has ended. Raises KeyError for an unknown one."""
        if number in self._given_up:
            self._given_up.remove(number)
            return
        handed_on_at = self._handed_on.pop(number)
        if computed and handed_on_at > self._computed_to:
            self._computed_to = handed_on_at
        if number not in self._in_progress:
            self.total -= self._next.pop(number)
            return
        tokens, started_at = self._in_progress.pop(number)
        self.total -= tokens
        self._in_progress_tokens -= tokens
        if number in self._overdue:
            self._overdue.remove(number)
            self._overdue_tokens -= tokens
        else:
            self._starts_sum -= started_at
        if not self._in_progress:  # resets the sums, rounding errors included
            self._starts_sum, self._ends = 0.0, []
        if self._next:
            self._begin(now, s_per_token)

    def give_up_overtaken(self, now: float, s_per_token: float) -> None:
        """Count no longer the prompts of an engine that hangs: the pool's others wait for nothing there."""
        while self._workers > 1 and self._in_progress:
            number, (tokens, _) = next(iter(self._in_progress.items()))
            handed_on_at = self._handed_on[number]
            late = now - handed_on_at - tokens * s_per_token > OVERTAKEN_S
            if not late or handed_on_at >= self._computed_to:
                return
            self.done(number, now, s_per_token)
            self._given_up.add(number)

    def ahead(self, now: float, s_per_token: float) -> int:
        """Tokens that one engine must compute before a new prompt's; 0 while an engine is free.

        Tokens of prompts in progress that should be computed by now are subtracted.
        """
        if len(self._in_progress) < self._workers:
            return 0
        while self._ends and self._ends[0][0] <= now:
            _, number = heapq.heappop(self._ends)
            if number in self._in_progress and number not in self._overdue:
                tokens, started_at = self._in_progress[number]
                self._overdue.add(number)
                self._overdue_tokens += tokens
                self._starts_sum -= started_at
        done = 0
        if s_per_token > 0.0:
            running = len(self._in_progress) - len(self._overdue)
            done = self._overdue_tokens + int((running * now - self._starts_sum) / s_per_token)
        return (self.total - min(self._in_progress_tokens, max(0, done))) // self._workers

    def _begin(self, now: float, s_per_token: float) -> None:
        while self._next and len(self._in_progress) < self._workers:
            number = next(iter(self._next))
            tokens = self._next.pop(number)
            self._in_progress[number] = (tokens, now)
            self._in_progress_tokens += tokens
            self._starts_sum += now
            ends_at = now + tokens * s_per_token if s_per_token > 0.0 else math.inf
            heapq.heappush(self._ends, (ends_at, number))
