"""The forecast of KV cache usage: each running sequence grows by a token a step until its expected end.

The peak lies just before some sequence's end; admission decides by that peak, because decisions by the
current load alone oscillate (Mooncake, FAST '25).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

# A request as the forecast reads it: (minus its remaining steps, tokens held now, number of sequences).
# Sorting these tuples puts the longest request first; equal tuples are interchangeable.
ForecastEntry = tuple[int, int, int]


class ReservedTokens:
    """One request in flight, in tokens; all counts but ``steps_left`` are sums over its ``width`` sequences.

    ``prompt`` needs KV blocks of its own (cached prefixes are shared). ``now`` is held at this moment,
    ``final`` in the end; ``steps_left`` are the steps it will still run, at least one; ``forecast_entry`` is
    for :func:`fullest`. Never changed: new counts replace it.
    """

    # The derived figures are stored: a forecast reads them for every sequence, and they change rarely.
    __slots__ = ("expected", "final", "forecast_entry", "now", "produced", "prompt", "steps_left", "width")

    def __init__(self, prompt: int, expected: int, produced: int = 0, *, width: int = 1) -> None:
        self.prompt, self.expected, self.produced, self.width = prompt, expected, produced, width
        self.now = prompt + produced
        self.steps_left = steps_left = (expected - produced) // width if expected - produced > width else 1
        self.final = self.now + steps_left * width
        self.forecast_entry: ForecastEntry = (-steps_left, self.now, width)


@dataclass(slots=True)
class Moment:
    """A moment of the forecast, ``steps`` from now: the tokens held by the sequences still ``alive`` then,
    without the unused rest of their last blocks."""

    steps: int
    tokens: int
    alive: int

    def count(self, held: ReservedTokens, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) the tokens of one request at that moment."""
        if held.steps_left >= self.steps:
            self.tokens += sign * (held.now + self.steps * held.width)
            self.alive += sign * held.width

    def with_slack(self, sequence_slack: int) -> int:
        """Tokens that the blocks of these sequences have room for."""
        return self.tokens + self.alive * sequence_slack


def fullest(
    entries: Sequence[ForecastEntry],
    *,
    sequence_slack: int = 0,
    extra: ReservedTokens | None = None,
    enough: float = math.inf,
) -> Moment:
    """The future moment at which these sequences will hold the most KV tokens together.

    ``entries`` is sorted, the longest first; ``sequence_slack`` is lost per sequence in its last block; the
    search may stop at a moment with more tokens than ``enough``.
    """
    running = entries
    if extra is not None:
        at = bisect_left(entries, extra.forecast_entry)
        running = [*entries[:at], extra.forecast_entry, *entries[at:]]
    total = peak = alive = steps = there = 0
    # When a sequence ends, exactly it and those before it in this order still hold tokens.
    for minus_left, now, width in running:
        alive += width
        total += now
        then = total + alive * (sequence_slack - minus_left)
        if then > peak:
            peak, steps, there = then, -minus_left, alive
            if then > enough:
                break
    return Moment(steps, peak - there * sequence_slack, there)


class KvPoolTokens:
    """A KV pool's size: ``tokens`` is its capacity, 0 when the backend has not reported it; a sequence wastes
    ``sequence_slack`` tokens on average in its last block.
    """

    def __init__(self, total_blocks: int = 0, block_size: int = 0) -> None:
        self.tokens = total_blocks * block_size
        self.sequence_slack = block_size // 2


class KvForecast:
    """The sequences handed to one backend, and how full they will make its pool."""

    def __init__(self) -> None:
        self._held: dict[int, ReservedTokens] = {}
        self._longest_first: list[ForecastEntry] = []
        self._stale = False  # whether that list must be sorted again
        # The peak that the last search found, with its counts kept up to date. It may no longer be the peak,
        # but a request that does not fit at this moment is refused without another search.
        self._moment: Moment | None = None
        # Tokens that all sequences hold now.
        self.now_tokens = 0
        self._final_tokens = 0
        self._sequences = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, ticket: int, held: ReservedTokens) -> None:
        self._held[ticket] = held
        self.now_tokens += held.now
        self._final_tokens += held.final
        self._sequences += held.width
        if self._moment is not None:
            self._moment.count(held, 1)
        if not self._stale:
            insort(self._longest_first, held.forecast_entry)

    def remove(self, ticket: int) -> ReservedTokens:
        """Remove a request that has ended. Raises KeyError for an unknown one: a second release."""
        held = self._held.pop(ticket)
        self.now_tokens -= held.now
        self._final_tokens -= held.final
        self._sequences -= held.width
        if self._moment is not None:
            self._moment.count(held, -1)
        if not self._stale:
            del self._longest_first[bisect_left(self._longest_first, held.forecast_entry)]
        return held

    def get(self, ticket: int) -> ReservedTokens:
        """The counts of one request; only :meth:`produced` and :meth:`cached` change them."""
        return self._held[ticket]

    def produced(self, ticket: int, tokens: int, expected: int) -> None:
        """Set the tokens produced so far, and those expected in all."""
        self._stale, self._moment = True, None
        held = self.remove(ticket)
        self.add(ticket, ReservedTokens(held.prompt, expected, tokens, width=held.width))

    def sort(self) -> None:
        """Restore the order after a round of :meth:`produced`."""
        if self._stale:
            self._longest_first = sorted([held.forecast_entry for held in self._held.values()])
            self._stale = False

    def cached(self, ticket: int, private_prompt: int) -> None:
        """Set the prompt tokens that need blocks of their own, once the engine reported its cache hit."""
        held = self.remove(ticket)
        self.add(ticket, ReservedTokens(private_prompt, held.expected, held.produced, width=held.width))

    def fits_surely(self, pool: KvPoolTokens, share: float, *, used: float, extra: ReservedTokens) -> bool:
        """Whether the sum of all requests' final sizes, which is never less than the peak, fits.

        Takes constant time; ``False`` means that :meth:`fits` must decide.
        """
        slack = pool.sequence_slack * (self._sequences + extra.width)
        return self._final_tokens + extra.final + slack <= share * pool.tokens - self._others(pool, used)

    def fits(self, pool: KvPoolTokens, share: float, *, used: float, extra: ReservedTokens) -> bool:
        """Whether ``extra`` can be added without the forecast's peak passing ``share`` of the pool."""
        room, slack, known = share * pool.tokens - self._others(pool, used), pool.sequence_slack, self._moment
        if known is not None:
            there = known.with_slack(slack)
            if extra.steps_left >= known.steps:
                there += extra.now + (known.steps + slack) * extra.width
            if there > room:
                return False
        self.sort()
        found = fullest(self._longest_first, sequence_slack=slack, extra=extra, enough=room)
        fits = found.with_slack(slack) <= room
        found.count(extra, -1)  # it is not handed on yet
        self._moment = found
        return fits

    def usage(self, pool: KvPoolTokens, *, used: float = 0.0) -> float:
        """Share of the pool in use at the forecast's peak; may exceed 1.

        ``used`` is the share that the engine reports now. Tokens beyond our own counts are assumed to be
        held at the peak as well.
        """
        if pool.tokens <= 0:
            return 0.0
        self.sort()
        slack = pool.sequence_slack
        peak = fullest(self._longest_first, sequence_slack=slack).with_slack(slack)
        return (self._others(pool, used) + peak) / pool.tokens

    def _others(self, pool: KvPoolTokens, used: float) -> float:
        others = used * pool.tokens - self.now_tokens - self._sequences * pool.sequence_slack
        return others if others > 0.0 else 0.0
