"""Resuming a partial answer: the check for all backends, and joining texts where only text is returned."""

from collections.abc import Awaitable, Callable, Sequence

from msgspec import structs

from gateway.backends.port import Completion, Continue, DeltaSink, PartialAnswer, Work
from gateway.contracts.events import Delta, joined
from gateway.contracts.values import FinishReason, FormatType, Usage
from resilience.failures import invalid_input

Generate = Callable[[Work, DeltaSink], Awaitable[Completion]]


def check_partial(work: Work, ways: frozenset[Continue], name: str) -> None:
    """Raise BackendFailure when the partial answer, if any, cannot be resumed in one of ``ways``."""
    partial = work.partial
    if partial is not None and (
        not ways
        or (partial.replay and Continue.EVENTS not in ways)
        or (partial.token_ids is None and Continue.TEXT not in ways)
        or work.sampling.n != 1
        or (work.response_format.type is not FormatType.TEXT and Continue.SHAPED not in ways)
    ):
        raise invalid_input(f"{name} cannot resume this answer")


def resumed_seed(seed: int | None, partial: PartialAnswer | None) -> int | None:
    """The seed for the rest after ``partial``, in 64 bits, for a backend whose generator starts again.

    With the same seed the rest would be drawn with the random numbers of the first part.
    """
    if seed is None or partial is None:
        return seed
    further = len(partial.text if partial.token_ids is None else partial.token_ids)
    return (seed + further + 2**63) % 2**64 - 2**63


def rest_of(min_tokens: int, partial: PartialAnswer | None) -> int:
    """The fewest tokens of the rest after ``partial``, for a backend that counts from there."""
    return min_tokens if partial is None else max(0, min_tokens - len(partial.token_ids or ()))


class TextSplice:
    """Joins new text to the text of a partial answer.

    A stop string that starts in the old text may end in the new one, which the backend does not notice. White
    space at the end of the old text (``trimmed``) is not sent, since many templates and models strip it, and
    may be generated again. Text is held back only while one of these may still happen.
    """

    def __init__(self, given: str, stops: Sequence[str], trimmed: str = "") -> None:
        self._rests = {
            stop[length:] for stop in stops for length in range(1, len(stop)) if given.endswith(stop[:length])
        }
        self._trimmed = trimmed
        self._held = ""

    @property
    def is_open(self) -> bool:
        """Whether the next text must still be inspected."""
        return bool(self._rests or self._trimmed)

    def push(self, text: str) -> str | None:
        """The text to pass on; ``None`` when the answer has ended at a stop string."""
        held = self._held + text
        while self._trimmed and held and held[0] == self._trimmed[0]:
            held, self._trimmed = held[1:], self._trimmed[1:]
        if held:
            self._trimmed = ""
        if any(held.startswith(rest) for rest in self._rests):
            return None
        self._rests = {rest for rest in self._rests if rest.startswith(held)}
        self._held = held if self._rests else ""
        return "" if self._rests else held

    def flush(self) -> str:
        """The text that was held back, when the answer has ended in another way."""
        return self._held


async def generate_rest(
    generate: Generate, work: Work, out: DeltaSink, *, trimmed: bool = False
) -> Completion:
    """Generate, and join the texts of a resumed answer; a stop string across both ends the generation.

    ``trimmed``: the white space at the end of the partial answer is not sent to the backend.
    """
    partial = work.partial
    if partial is None:
        return await generate(work, out)
    text = partial.text
    splice = TextSplice(text, work.sampling.stop, text[len(text.rstrip()) :] if trimmed else "")
    if not splice.is_open:
        return await generate(work, out)
    gate = _Gate(splice, out, replayed=partial.replay)
    try:
        completion = await generate(work, gate.push)
    except _StopReached:
        await out(gate.first)
        return Completion(
            FinishReason.STOP,
            Usage(work.input_tokens, gate.first.tokens, gate.first.cached_tokens or 0),
            gate.first.queue_wait_s or 0.0,
        )
    await gate.end()
    return completion


class _StopReached(Exception):
    """The answer has ended at a stop string, so the backend must stop."""


class _Gate:
    """A sink that passes on what the splice returns. ``first`` collects what is held back.

    ``replayed``: events before the first one with tokens are of the partial answer and pass unchanged.
    """

    def __init__(self, splice: TextSplice, out: DeltaSink, *, replayed: bool) -> None:
        self._splice = splice
        self._out = out
        self._replayed = replayed
        self._open = True
        self.first = Delta("", 0)

    async def push(self, delta: Delta) -> None:
        self._replayed = self._replayed and not delta.tokens
        if not self._open or self._replayed:
            return await self._out(delta)
        if delta.__class__ is not Delta:
            await self.end()
            self._open = False
            return await self._out(delta)
        text = self._splice.push(delta.text)
        self.first = joined(self.first, delta, text or "")
        if text is None:
            raise _StopReached
        if text or not self._splice.is_open:
            self._open = False
            await self._out(self.first)

    async def end(self) -> None:
        """Pass on what is held back, since the backend has ended."""
        if self._open:
            held = structs.replace(self.first, text=self._splice.flush())
            if held.text or held.tokens:
                await self._out(held)
