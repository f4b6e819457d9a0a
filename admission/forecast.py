"""How full the KV cache will get: the sequences that run now, each growing until its expected end.

A sequence holds its prompt and what it has produced, grows by a token a step, and gives all back when it
ends. The fullest moment lies just before some sequence's end; admitting looks at that moment instead of at
now (Mooncake, FAST '25: rejecting on the current load alone oscillates).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter


class Held:
    """One request in flight, in tokens.

    Args:
        prompt: tokens of the prompt that need KV blocks of their own (cached prefixes are shared).
        expected: tokens the answer will likely have in the end.
        produced: tokens of the answer so far.
        width: sequences that grow side by side from one prompt, whose tokens the other counts add up.

    Attributes:
        now: tokens held at this moment.
        left: steps it will still run; at least one, however wrong the expectation was.
        final: tokens it will hold in the end.
    """

    # The derived figures are stored: a forecast reads them of every sequence, and they change rarely.
    __slots__ = ("expected", "final", "left", "now", "produced", "prompt", "width")

    def __init__(self, prompt: int, expected: int, produced: int = 0, *, width: int = 1) -> None:
        self.width = width
        self.set(prompt, expected, produced)

    def set(self, prompt: int, expected: int, produced: int) -> None:
        """Change the counts."""
        self.prompt, self.expected, self.produced = prompt, expected, produced
        self.now = prompt + produced
        self.left = max(1, (expected - produced) // self.width)
        self.final = self.now + self.left * self.width


_left = attrgetter("left")


def _ends_first(held: Held) -> int:
    return -held.left


def peak_tokens(
    held: Sequence[Held], *, sequence_slack: int = 0, extra: Held | None = None, enough: float = math.inf
) -> int:
    """The most KV tokens that these sequences will hold together at any later step.

    Args:
        held: those that will run longest first (by ``left``).
        sequence_slack: tokens lost per sequence in its last, half-filled block.
        extra: one more, of any length.
        enough: a sum above this may be given in place of the peak.
    """
    running = held if extra is None else _with(extra, held)
    total = peak = alive = 0
    # When `left` steps have passed, exactly those seen so far are still there.
    for one in running:
        alive += one.width
        total += one.now
        then = total + alive * (one.left + sequence_slack)
        if then > peak:
            peak = then
            if then > enough:
                break
    return peak


def _with(extra: Held, held: Sequence[Held]) -> list[Held]:
    at = bisect_left(held, -extra.left, key=_ends_first)
    return [*held[:at], extra, *held[at:]]


@dataclass(frozen=True, slots=True)
class Pool:
    """A KV pool's size; 0 tokens when the backend has not told."""

    total_blocks: int = 0
    block_size: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.total_blocks * self.block_size

    @property
    def sequence_slack(self) -> int:
        """Tokens a sequence wastes on average in its last block."""
        return self.block_size // 2


class KvForecast:
    """The sequences handed to one backend, and how full they will make its pool."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._longest_first: list[Held] = []
        self._in_order = True
        self._now_tokens = 0
        self._final_tokens = 0
        self._sequences = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, ticket: int, held: Held) -> None:
        """A sequence was handed on."""
        self._held[ticket] = held
        self.sort()
        insort(self._longest_first, held, key=_ends_first)
        self._count(held, 1)

    def remove(self, ticket: int) -> Held:
        """It has ended. Raises KeyError for one that is not there: it would be released twice."""
        held = self._held.pop(ticket)
        self._longest_first.remove(held)
        self._count(held, -1)
        return held

    def get(self, ticket: int) -> Held:
        """One sequence; its counts are changed by :meth:`produced` and :meth:`cached` only."""
        return self._held[ticket]

    def produced(self, ticket: int, tokens: int, expected: int) -> None:
        """So many tokens of the answer are there, and so many are expected in all."""
        held = self._held[ticket]
        self._count(held, -1)
        held.set(held.prompt, expected, tokens)
        self._count(held, 1)
        self._in_order = False

    def sort(self) -> None:
        """Put them in order again after :meth:`produced` has told of all that changed."""
        if not self._in_order:
            self._longest_first.sort(key=_left, reverse=True)
            self._in_order = True

    def cached(self, ticket: int, private_prompt: int) -> None:
        """The engine has told how much of the prompt it found; the rest needs blocks of its own."""
        held = self._held[ticket]
        self._count(held, -1)
        held.set(private_prompt, held.expected, held.produced)
        self._count(held, 1)

    @property
    def now_tokens(self) -> int:
        """Tokens held now, by these counts."""
        return self._now_tokens

    def fits_surely(self, pool: Pool, share: float, *, used: float, extra: Held) -> bool:
        """Whether even the sum of what all will hold in the end, never less than the peak, fits.

        Costs the same however many there are; a ``False`` says nothing.
        """
        slack = pool.sequence_slack * (self._sequences + extra.width)
        return self._final_tokens + extra.final + slack <= share * pool.tokens - self._others(pool, used)

    def fits(self, pool: Pool, share: float, *, used: float, extra: Held) -> bool:
        """Whether ``extra`` can be added without the fullest moment to come passing ``share`` of the pool."""
        room = share * pool.tokens - self._others(pool, used)
        return self._peak(pool, extra, enough=room) <= room

    def usage(self, pool: Pool, *, used: float = 0.0) -> float:
        """Share of the pool in use at the fullest moment to come; may exceed 1.

        ``used`` is what the engine says of now. What it holds beyond our own counts (other callers, blocks
        not yet given back) is there at the peak as well.
        """
        if pool.tokens <= 0:
            return 0.0
        return (self._others(pool, used) + self._peak(pool, None)) / pool.tokens

    def _others(self, pool: Pool, used: float) -> float:
        return max(0.0, used * pool.tokens - self._now_tokens - self._sequences * pool.sequence_slack)

    def _peak(self, pool: Pool, extra: Held | None, *, enough: float = math.inf) -> int:
        self.sort()
        return peak_tokens(
            self._longest_first, sequence_slack=pool.sequence_slack, extra=extra, enough=enough
        )

    def _count(self, held: Held, sign: int) -> None:
        self._now_tokens += sign * held.now
        self._final_tokens += sign * held.final
        self._sequences += sign * held.width
