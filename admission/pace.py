"""How fast those who are being answered get their tokens, and how many side by side their targets allow.

An answer tells its pace when it is whole; those that began beside it are then late as well. So the pace is
taken of all in flight, over windows of a few steps. Figures from runs on an engine whose speed wanders:
docs/admission-simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Tokens of each text that a window spans: about what the shorter answers of chat traffic have. With 16 what
# differs between windows is mostly whose prompts were computed meanwhile, and the limit falls for nothing.
STEPS = 32
# Weight of a new window: a change of speed is followed within some five windows.
WEIGHT = 0.2
# Windows before anything is said; one is enough where it is over the target by so much.
ENOUGH_WINDOWS, LATE = 4, 1.25
# The tokens of those in flight are counted no oftener.
LOOK_S = 0.05
# What was learned with fewer or more side by side, by this share and by more than two, is begun anew.
ALIKE_SHARE, ALIKE_LEAST = 0.3, 2.0


@dataclass(slots=True)
class _Answering:
    """One that has its first token; ``tokens`` and ``since``: as the window or its answer began."""

    produced: Callable[[], int]
    texts: int
    target_s: float
    tokens: int
    since: float


class Pace:
    """Mean time between two tokens of a text as a share of its target, with its spread, and at how many.

    Answers without a target are only counted among those side by side.
    """

    __slots__ = (
        "_answering",
        "_begun_at",
        "_beside",
        "_beside_seconds",
        "_counted_at",
        "_looked_at",
        "_seconds",
        "_sequences",
        "_share",
        "_shares",
        "_spread",
        "_tokens",
        "_windows",
    )  # fmt: skip

    def __init__(self) -> None:
        self._answering: dict[int, _Answering] = {}
        # This window: since when; of those that have left it, text seconds, the same over their targets, and
        # tokens; sequences in flight, summed over time.
        self._begun_at = self._looked_at = self._counted_at = 0.0
        self._seconds = self._shares = 0.0
        self._tokens = 0
        self._beside = 0
        self._beside_seconds = 0.0
        # Of the windows so far.
        self._windows = 0
        self._sequences = self._share = self._spread = 0.0

    def beside(self, sequences: int, now: float) -> None:
        """From now on so many are in flight."""
        self._beside_seconds += self._beside * (now - self._counted_at)
        self._beside, self._counted_at = sequences, now

    def begin(
        self, number: int, produced: Callable[[], int], now: float, *, texts: int, target_s: float | None
    ) -> None:
        """It has its first token; ``produced`` counts those of all its texts, ``target_s`` is for each."""
        if target_s is None:
            return
        if not self._answering:
            self._open(now)
        # The count of a first token that is just being passed on may not have it yet.
        self._answering[number] = _Answering(produced, texts, target_s, max(1, produced()), now)

    def end(self, number: int, tokens: int, now: float) -> None:
        """Its answer has ended with so many tokens; one that is not there changes nothing."""
        one = self._answering.pop(number, None)
        if one is None:
            return
        self._seconds += one.texts * (now - one.since)
        self._shares += one.texts * (now - one.since) / one.target_s
        self._tokens += max(0, tokens - one.tokens)

    def look(self, now: float) -> bool:
        """Close the window if it is long enough; whether :meth:`allows` may have changed."""
        if not self._answering or now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        seconds, shares, tokens = self._seconds, self._shares, self._tokens
        for one in self._answering.values():
            seconds += one.texts * (now - one.since)
            shares += one.texts * (now - one.since) / one.target_s
            tokens += max(0, one.produced() - one.tokens)
        window_s = now - self._begun_at
        if tokens == 0 or tokens * window_s < STEPS * seconds:
            return False
        self.beside(self._beside, now)
        self._learn(shares / tokens, self._beside_seconds / window_s)
        self._open(now)
        return True

    def allows(self) -> tuple[float, float] | None:
        """Sequences that keep to the targets, and how many there were; ``None`` while too little is known.

        The mean with its spread, so that answers slower than most keep to them as well. That the time of a
        step grows with the number, its fixed part too, is too much for more of them and too little for fewer:
        the next windows tell.
        """
        if self._windows < (ENOUGH_WINDOWS if self._share <= LATE else 1):
            return None
        return self._sequences / max(1e-9, self._share + self._spread), self._sequences

    @property
    def share(self) -> float | None:
        """Mean time between two tokens over its target; ``None`` before the first window has ended."""
        return self._share if self._windows else None

    def _open(self, now: float) -> None:
        self._begun_at, self._seconds, self._shares, self._tokens = now, 0.0, 0.0, 0
        self._beside_seconds, self._counted_at = 0.0, now
        for one in self._answering.values():
            one.tokens, one.since = max(one.tokens, one.produced()), now

    def _learn(self, share: float, sequences: float) -> None:
        if abs(sequences - self._sequences) > max(ALIKE_LEAST, ALIKE_SHARE * self._sequences):
            self._windows = 0
        if not self._windows:
            self._windows, self._share, self._spread, self._sequences = 1, share, 0.0, sequences
            return
        self._windows += 1
        weight = max(1.0 / self._windows, WEIGHT)
        self._spread += weight * (abs(share - self._share) - self._spread)
        self._share += weight * (share - self._share)
        self._sequences += weight * (sequences - self._sequences)
