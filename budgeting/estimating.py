"""How many tokens a text takes for a model whose tokenizer is not published, such as those of Bedrock.

A text's size is guessed from its bytes. What the model reports for each request corrects the guess by one
factor a model. The upper estimate adds a margin: a fixed one at first, then a little more than the worst of
the recent errors.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from budgeting.values import Message

# Tokens per character of 1 to 4 bytes in UTF-8: ASCII, most alphabets, most Asian scripts, emoji.
_ONE, _TWO, _THREE, _FOUR = 0.25, 0.5, 0.9, 2.0
# Tokens of the markup of a message, and of a request without messages.
_MESSAGE_TOKENS = 5.0
_REQUEST_TOKENS = 8.0

# Margins as a share of the estimate: before there are enough reports, and the least and most afterwards.
UNSEEN_MARGIN = 0.30
MIN_MARGIN = 0.05
MAX_MARGIN = 0.60
# Reports from which the margin is computed, and the number it needs; bound on the models known at once.
REMEMBERED = 64
ENOUGH = 8
MAX_MODELS = 256
# One report moves the factor by _STEP of the difference; a report's own factor is clamped to these bounds.
_STEP = 0.15
_LOWEST, _HIGHEST = 0.2, 5.0
_DRIFT = 0.10  # share by which the factor must have moved to become that of :meth:`EstimatingCounter.factor`
_WIDER = 1.25  # the margin is the worst of the stored errors, times this


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected tokens, and an upper estimate."""

    expected: int
    at_most: int


@dataclass(slots=True)
class _Learned:
    factor: float = 1.0
    steady: float = 1.0
    reports: int = 0
    # The share by which each of the last reports exceeded its estimate.
    above: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def margin(self) -> float:
        if len(self.above) < ENOUGH:
            return UNSEEN_MARGIN
        return min(max(max(self.above) * _WIDER, MIN_MARGIN), MAX_MARGIN)


class EstimatingCounter:
    """Estimates by model; thread-safe and bounded."""

    def __init__(self) -> None:
        self._of = lru_cache(MAX_MODELS)(lambda model: _Learned())
        self._lock = threading.Lock()

    def estimate(self, model: str, messages: Iterable[Message]) -> Estimate:
        size = rough_tokens(messages)
        with self._lock:
            learned = self._of(model)
            expected, margin = size * learned.factor, learned.margin
        return Estimate(math.ceil(expected), math.ceil(expected * (1 + margin)))

    def factor(self, model: str) -> float:
        """The factor on a guess from bytes alone for ``model``; after the first reports it seldom moves.

        Only while it stays do conversations of one beginning have equal ids, and go to one worker.
        """
        with self._lock:
            return self._of(model).steady

    def margin(self, model: str) -> float:
        """The margin of an estimate for ``model``, as a share of the estimate."""
        with self._lock:
            return self._of(model).margin

    def learn(self, model: str, messages: Iterable[Message], reported_tokens: int) -> None:
        if reported_tokens <= 0:
            return
        size = rough_tokens(messages)
        ratio = min(max(reported_tokens / size, _LOWEST), _HIGHEST)
        with self._lock:
            learned = self._of(model)
            if learned.reports:
                learned.above.append(ratio / learned.factor - 1)
            learned.reports += 1
            # The first reports count in full, later ones move the factor a little.
            learned.factor += max(_STEP, 1 / learned.reports) * (ratio - learned.factor)
            if learned.reports <= ENOUGH or abs(learned.factor / learned.steady - 1) > _DRIFT:
                learned.steady = learned.factor


def rough_tokens(messages: Iterable[Message]) -> float:
    """A guess of a conversation's tokens from its bytes alone; positive."""
    return _REQUEST_TOKENS + sum(
        _MESSAGE_TOKENS + sum(map(rough_text_tokens, message.texts)) for message in messages
    )


def rough_text_tokens(text: str) -> float:
    if text.isascii():
        return len(text) * _ONE
    # Characters of one to four bytes, from four lengths that are all computed at C speed.
    ones = len(text.encode("ascii", "ignore"))
    fours = len(text.encode("utf-16-le", "surrogatepass")) // 2 - len(text)
    more = len(text) - ones - fours
    threes = len(text.encode("utf-8", "surrogatepass")) - ones - 4 * fours - 2 * more
    return ones * _ONE + (more - threes) * _TWO + threes * _THREE + fours * _FOUR
