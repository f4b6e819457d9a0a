"""The time between tokens of the answers in progress, and the concurrency at which it meets the targets.

The pace of an ended answer is known too late: answers started with it are late as well. So all requests in
flight are measured, over windows of a few steps. Figures: docs/admission-simulator.md.
"""

from collections.abc import Callable

from msgspec import Struct

# Tokens of each text in a window: about the length of short chat answers. With 16 the windows differ mostly
# by the prompts that were computed meanwhile, and the limit falls without a reason.
STEPS = 32
WEIGHT = 0.2  # weight of a new window: a change of speed is followed within some five windows
# Windows before the pace counts; one is enough when it is over the target by this factor.
ENOUGH_WINDOWS, LATE = 4, 1.25
ALONE = 1.25  # with at most this many sequences on average in a window, an answer is taken to have run alone
LOOK_S = 0.05  # tokens in flight are counted at most this often
# When the concurrency has changed by this share, and by more than two, learning starts again.
ALIKE_SHARE, ALIKE_LEAST = 0.3, 2.0


class _Answering(Struct):
    """An answer in progress; ``tokens`` and ``since`` are as of the start of the window or of the answer."""

    produced: Callable[[], int]
    texts: int
    target_s: float
    tokens: int
    since: float


class Pace:
    """Mean and spread of the time between two tokens divided by its target, and the concurrency meanwhile."""

    def __init__(self) -> None:
        self._answering: dict[int, _Answering] = {}
        self.alone_s = 0.0  # the time per token of an answer that ran alone; 0: unknown
        # This window: its start; sums over answers that ended in it (seconds of text, the same over their
        # targets, tokens); sequences in flight, integrated over time.
        self._begun_at = self._looked_at = self._counted_at = 0.0
        self._seconds = self._shares = 0.0
        self._tokens = 0
        self._running = 0
        self._running_seconds = 0.0
        # Averages over the windows so far.
        self._windows = 0
        self._sequences = self._share = self._spread = 0.0

    def set_running(self, sequences: int, now: float) -> None:
        self._running_seconds += self._running * (now - self._counted_at)
        self._running, self._counted_at = sequences, now

    def begin(
        self, number: int, produced: Callable[[], int], now: float, *, texts: int, target_s: float | None
    ) -> None:
        """Measure a request from its first token on; ``produced`` is of all texts, ``target_s`` per text."""
        if target_s is None:
            return
        if not self._answering:
            self._open(now)
        # The first token may not be counted yet.
        self._answering[number] = _Answering(produced, texts, target_s, produced() or 1, now)

    def end(self, number: int, tokens: int, now: float) -> None:
        """Add an answer that has ended with ``tokens`` to the window; an unknown number changes nothing."""
        one = self._answering.pop(number, None)
        if one is None:
            return
        seconds = one.texts * (now - one.since)
        self._seconds += seconds
        self._shares += seconds / one.target_s
        if tokens > one.tokens:
            self._tokens += tokens - one.tokens

    def look(self, now: float) -> bool:
        """Close the window if it is long enough; return whether :meth:`allows` may have changed."""
        if not self._answering or now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        seconds, shares, tokens = self._seconds, self._shares, self._tokens
        for one in self._answering.values():
            seconds += one.texts * (now - one.since)
            shares += one.texts * (now - one.since) / one.target_s
            tokens += max(0, one.produced() - one.tokens)
        window_s = now - self._begun_at
        if window_s <= 0 or tokens == 0 or tokens * window_s < STEPS * seconds:
            return False
        self.set_running(self._running, now)
        sequences = self._running_seconds / window_s
        if sequences <= ALONE:
            self.alone_s = seconds / tokens
        self._learn(shares / tokens, sequences)
        self._open(now)
        return True

    def allows(self) -> tuple[float, float] | None:
        """Sequences that would meet the targets, and how many ran; ``None`` while too little is known.

        By the mean plus its spread, so that slower answers meet them too, and a step time proportional to the
        concurrency; the next windows correct the error.
        """
        if self._windows < (ENOUGH_WINDOWS if self._share <= LATE else 1):
            return None
        return self._sequences / max(1e-9, self._share + self._spread), self._sequences

    @property
    def share(self) -> float | None:
        """Mean time between two tokens divided by its target; ``None`` before the end of the first window."""
        return self._share if self._windows else None

    def _open(self, now: float) -> None:
        self._begun_at, self._seconds, self._shares, self._tokens = now, 0.0, 0.0, 0
        self._running_seconds, self._counted_at = 0.0, now
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
