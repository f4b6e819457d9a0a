"""What is given up when a prompt does not fit: one order, fixed by the sections' budgets alone.

Always sent: system messages, context, the latest turn, the generation prompt; they borrow from every other
section. The rest is offered room in this order, and the first item that does not fit ends it:

1. evidence, best first, while its section's budget lasts;
2. exchanges (a user turn with its answers), newest first, while the recent turns' budget lasts;
3. the evidence left, best first: it borrows what the other sections did not need;
4. the exchanges left, newest first: they borrow last (evidence before chit-chat, seed 000 §11).

Room a section does not need is not kept for it: it stays in the one sum that steps 3 and 4 draw on. A chunk
that alone exceeds the evidence budget waits until after the others, so that it cannot shut them out.

Since the order does not depend on how much room there is, and what is sent is a beginning of it, more room
never sends less: no chunk and no turn is lost by a larger budget. The price is that up to one item's room
may stay unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """The next thing to send: a chunk (its position), or an exchange (where its turns start).

    ``tokens`` is what it is expected to add.
    """

    tokens: int
    chunk: int | None = None
    first_turn: int | None = None


def offers(
    *,
    ranked_chunks: Sequence[int],
    exchange_starts: Sequence[int],
    chunk_tokens: Callable[[int], int],
    exchange_tokens: Callable[[int], int],
    evidence_room: int,
    turns_room: int,
) -> Iterator[Offer]:
    """The order above, made as it is asked for: what is never reached is never counted.

    Args:
        ranked_chunks: positions of the chunks, best first.
        exchange_starts: starts of the exchanges, oldest first.
        chunk_tokens: tokens a chunk adds, by position.
        exchange_tokens: tokens an exchange adds, by its place in ``exchange_starts``.
        evidence_room: what the evidence section's budget has left beside the context.
        turns_room: what the recent turns' budget has left beside the latest turn.
    """
    chunks = _Queue(ranked_chunks, chunk_tokens, too_large=evidence_room)
    for position, tokens in chunks.within(evidence_room):
        yield Offer(tokens, chunk=position)
    turns = _Queue(range(len(exchange_starts) - 1, -1, -1), exchange_tokens)
    for place, tokens in turns.within(turns_room):
        yield Offer(tokens, first_turn=exchange_starts[place])
    for position, tokens in chunks.rest():
        yield Offer(tokens, chunk=position)
    for place, tokens in turns.rest():
        yield Offer(tokens, first_turn=exchange_starts[place])


class _Queue:
    """Items in order; counts each once, when it is looked at."""

    def __init__(
        self, items: Sequence[int], count: Callable[[int], int], *, too_large: int | None = None
    ) -> None:
        self._items = items
        self._count = count
        self._too_large = too_large
        self._next = 0
        self._held: tuple[int, int] | None = None
        self._last: list[tuple[int, int]] = []

    def within(self, room: int) -> Iterator[tuple[int, int]]:
        """Items until one does not fit in ``room`` any more."""
        for item, tokens in self._counted():
            if tokens > room:
                self._held = (item, tokens)
                return
            room -= tokens
            yield item, tokens

    def rest(self) -> Iterator[tuple[int, int]]:
        """All that :meth:`within` left, those too large by themselves last."""
        if self._held is not None:
            yield self._held
        yield from self._counted()
        yield from self._last

    def _counted(self) -> Iterator[tuple[int, int]]:
        while self._next < len(self._items):
            item = self._items[self._next]
            self._next += 1
            tokens = self._count(item)
            if self._too_large is not None and tokens > self._too_large:
                self._last.append((item, tokens))
            else:
                yield item, tokens


def largest_that_fits(guess: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to ``most`` that fits, looking near ``guess`` first.

    ``fits`` must be true of 0 and, once false, stay false. Asks it twice when the guess is right, and
    a logarithmic number of times otherwise.
    """
    low, high = 0, most + 1  # low fits, high does not
    step = 1
    at = min(max(guess, 0), most)
    if at > 0 and fits(at):
        low = at
    elif at > 0:
        high = at
    while high - low > 1:
        if low >= at and high == most + 1:
            probe = min(low + step, most)
        elif high <= at and low == 0:
            probe = max(high - step, 1)
        else:
            probe = (low + high) // 2
        step *= 2
        if fits(probe):
            low = probe
        else:
            high = probe
    return low
