"""Decides what is left out when a prompt does not fit: one order, fixed by the sections' budgets alone.

Always sent: system messages, context, the latest turn, the generation prompt; they borrow from every other
section. The other parts get room in this order, up to the first item that does not fit:

1. evidence, best first, within its section's budget; a chunk larger than the section is cut at the end of a
   sentence to the room that the section has left;
2. exchanges (a user turn with its answers), newest first, within the recent turns' budget;
3. the summary of the turns that are not sent: up to its budget, or the room there is;
4. items beyond their section's budget, which borrow spare tokens, section by section in the declared order:
   by default evidence, then exchanges (answers need the evidence more than old turns). The rest of a chunk
   that is too large for its section comes after the other evidence.

The order does not depend on how much room there is, and what is sent is a beginning of it, so a larger budget
never drops a chunk or a turn. The price is that up to one item's room may stay unused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from budgeting.values import SPARE_ORDER, PromptSection


@dataclass(frozen=True, slots=True)
class TrimCandidate:
    """The next thing to send: a chunk (its position), an exchange (its first turn), or the summary.

    ``tokens`` is the expected number that it adds; ``text`` is a chunk's text after a cut (``None``: no cut).
    """

    tokens: int
    chunk: int | None = None
    first_turn: int | None = None
    text: str | None = None

    @property
    def summary(self) -> bool:
        return self.chunk is None and self.first_turn is None


# Cuts a chunk (by position) to a number of tokens; returns the text and its tokens, or ``None``.
Cut = Callable[[int, int], tuple[str, int] | None]


def offers(
    *,
    ranked_chunks: Sequence[int],
    exchange_starts: Sequence[int],
    chunk_tokens: Callable[[int], int],
    exchange_tokens: Callable[[int], int],
    evidence_room: int,
    turns_room: int,
    summary_room: int = 0,
    cut: Cut = lambda position, room: None,
    spare: Sequence[PromptSection] = SPARE_ORDER,
) -> Iterator[TrimCandidate]:
    """The candidates in the order above, computed lazily: one that is never reached is never counted.

    Args:
        ranked_chunks: positions of the chunks, best first.
        exchange_starts: starts of the exchanges, oldest first.
        chunk_tokens: tokens a chunk adds, by position.
        exchange_tokens: tokens an exchange adds, by its index in ``exchange_starts``.
        evidence_room: budget of the evidence section without the context.
        turns_room: budget of the recent turns without the latest.
        summary_room: the summary's budget; 0: none is offered.
        cut: shortens a chunk.
        spare: the sections that borrow, in order.
    """
    chunks: Iterator[tuple[int, int]] = ((at, chunk_tokens(at)) for at in ranked_chunks)
    large: list[TrimCandidate] = []  # chunks larger than the section, or what a cut left of them
    room = evidence_room
    for at, tokens in chunks:
        if tokens > evidence_room:
            shorter = cut(at, room) if room > 0 else None
            part = 0
            if shorter is not None:
                text, part = shorter
                yield TrimCandidate(part, chunk=at, text=text)
            large.append(TrimCandidate(tokens - part, chunk=at))
            room -= part
        elif tokens > room:
            chunks = chain(((at, tokens),), chunks)
            break
        else:
            room -= tokens
            yield TrimCandidate(tokens, chunk=at)
    exchanges: Iterator[TrimCandidate] = (
        TrimCandidate(exchange_tokens(place), first_turn=exchange_starts[place])
        for place in reversed(range(len(exchange_starts)))
    )
    for exchange in exchanges:
        turns_room -= exchange.tokens
        if turns_room < 0:
            exchanges = chain((exchange,), exchanges)
            break
        yield exchange
    if summary_room > 0:
        yield TrimCandidate(summary_room)
    for section in spare:
        if section is PromptSection.RETRIEVAL:
            for at, tokens in chunks:
                if tokens > evidence_room:
                    large.append(TrimCandidate(tokens, chunk=at))
                else:
                    yield TrimCandidate(tokens, chunk=at)
            yield from large
        elif section is PromptSection.RECENT_TURNS:
            yield from exchanges


def largest_that_fits(guess: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to ``most`` that fits, searched from ``guess`` outwards.

    ``fits`` must be true of 0 and monotonic. It is called twice when the guess is right, and a logarithmic
    number of times otherwise.
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
