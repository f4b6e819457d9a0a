"""Lengths of answers, learned online for each kind of request.

Answers are usually much shorter than ``max_tokens``; a forecast that reserved that bound would leave most of
the KV cache idle.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable
from itertools import accumulate

from admission.rates import ByKind

# Buckets grow by a fourth of an octave: a quantile is at most 19 % too long.
STEPS_PER_OCTAVE = 4
BUCKETS = 20 * STEPS_PER_OCTAVE  # up to a million tokens
# Weight of a sample relative to the next one: the last 350 answers have half of the total weight.
DECAY = 0.998
# Expected tokens of an answer without max_tokens while no length is known: longer than most chat answers.
FIRST_GUESS = 512
# Below this weight of samples the lengths of all requests are used instead of the kind's.
TRUSTED_WEIGHT = 20.0


# The longest length of each bucket, tokens.
UPPER_EDGES = tuple(math.floor(2 ** (bucket / STEPS_PER_OCTAVE)) for bucket in range(BUCKETS))


def bucket_of(tokens: int) -> int:
    return bisect_left(UPPER_EDGES, tokens, 0, BUCKETS - 1)


class LengthHistogram:
    """Lengths with exponentially decaying weights; learning and queries take constant time."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._at, self._below = 0, 0.0  # the last quantile's bucket, and the sum of those below it
        self._gain = 1.0
        self.weight = 0.0

    def learn(self, bucket: int) -> None:
        """Add a length. New samples weigh more, which equals decaying the old ones."""
        self._counts[bucket] += self._gain
        if bucket < self._at:
            self._below += self._gain
        self.weight = self.weight * DECAY + 1.0
        self._gain /= DECAY
        if self._gain > 1e12:
            self._counts = [count / self._gain for count in self._counts]
            self._below, self._gain = self._below / self._gain, 1.0

    def quantile(self, share: float, *, beyond: int = 0) -> int | None:
        """The length that ``share`` of those longer than ``beyond`` do not exceed; ``None`` without any."""
        if beyond > 0:
            first = bucket_of(beyond) + 1
            sums = list(accumulate(self._counts[first:]))
            if not sums or sums[-1] <= 0.0:
                return None
            return UPPER_EDGES[first + bisect_left(sums, share * sums[-1] - 1e-9)]
        if not self.weight:
            return None
        counts, at, below = self._counts, self._at, self._below
        wanted = share * self.weight * DECAY * self._gain * (1 - 1e-9)
        while below + counts[at] < wanted:  # one more answer seldom moves it
            below, at = below + counts[at], at + 1
        while at and below >= wanted:
            at -= 1
            below -= counts[at]
        self._at, self._below = at, below
        return UPPER_EDGES[at]


class OutputLengths:
    """Expected lengths of answers by kind (e.g. route and intent), as a quantile ``share`` of the learned
    ones.

    A higher share leaves more KV blocks free for answers that turn out long, a lower one fills the batch
    more.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._kinds = ByKind(LengthHistogram)
        self._all = LengthHistogram()

    def learn(self, kind: Hashable, tokens: int) -> None:
        bucket = bucket_of(tokens)
        self._kinds[kind].learn(bucket)
        self._kinds.move_to_end(kind)
        self._all.learn(bucket)

    def expect(self, kind: Hashable, cap: int, *, produced: int = 0, open_ended: bool = False) -> int:
        """Expected tokens of a whole answer, of which ``produced`` exist already; at most ``cap``.

        Before anything is known the result is ``cap``, so that the forecast rather reserves too much; for an
        ``open_ended`` answer, whose cap is the rest of the context, it is a guess that grows with the answer.
        """
        histogram = self._kinds.get(kind)
        if histogram is None or histogram.weight < TRUSTED_WEIGHT:
            histogram = self._all if self._all.weight >= TRUSTED_WEIGHT else None
        found = histogram.quantile(self._share, beyond=produced) if histogram is not None else None
        if found is None:
            found = max(FIRST_GUESS, 2 * produced) if open_ended else cap
        elif found <= produced:
            found = produced + 1
        return found if found < cap else cap
