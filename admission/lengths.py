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


def bucket_of(tokens: int) -> int:
    if tokens <= 1:
        return 0
    return min(BUCKETS - 1, math.ceil(math.log2(tokens) * STEPS_PER_OCTAVE))


# The longest length of each bucket, tokens.
UPPER_EDGES = tuple(math.floor(2 ** (bucket / STEPS_PER_OCTAVE)) for bucket in range(BUCKETS))


class LengthHistogram:
    """Lengths with exponentially decaying weights; learning and queries take constant time."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._used = 0  # buckets below the first that has never had one
        self._last_quantile: tuple[float, int] | None = None  # (share, length) until the next sample
        self._gain = 1.0
        self.weight = 0.0

    def learn(self, bucket: int) -> None:
        """Add a length. New samples weigh more, which equals decaying the old ones."""
        self._counts[bucket] += self._gain
        self._used, self._last_quantile = max(self._used, bucket + 1), None
        self.weight = self.weight * DECAY + 1.0
        self._gain /= DECAY
        if self._gain > 1e12:
            self._counts = [count / self._gain for count in self._counts]
            self._gain = 1.0

    def quantile(self, share: float, *, beyond: int = 0) -> int | None:
        """The length that ``share`` of those longer than ``beyond`` do not exceed; ``None`` without any."""
        if beyond <= 0 and self._last_quantile is not None and self._last_quantile[0] == share:
            return self._last_quantile[1]
        first = bucket_of(beyond) + 1 if beyond > 0 else 0
        sums = list(accumulate(self._counts[first : self._used]))
        if not sums or sums[-1] <= 0.0:
            return None
        found = UPPER_EDGES[first + bisect_left(sums, share * sums[-1] - 1e-9)]
        if not first:
            self._last_quantile = (share, found)
        return found


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
        if found is None and open_ended:
            found = max(FIRST_GUESS, 2 * produced)
        return cap if found is None else min(cap, max(found, produced + 1))
