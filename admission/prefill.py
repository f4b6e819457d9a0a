"""The prompts that a backend has been handed and has not yet computed."""

from __future__ import annotations


class PrefillBacklog:
    """Uncached prompt tokens handed on and without a first token; engines compute them one by one."""

    __slots__ = ("_since", "_tokens", "_total")

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by ticket, in order of hand-over
        self._since = 0.0  # when the first of them came to be the first
        self._total = 0

    def __bool__(self) -> bool:
        return bool(self._tokens)

    @property
    def total(self) -> int:
        """Tokens of all of them, as if none had been begun."""
        return self._total

    def add(self, number: int, tokens: int, now: float) -> None:
        """A prompt was handed on."""
        if not self._tokens:
            self._since = now
        self._tokens[number] = tokens
        self._total += tokens

    def done(self, number: int, now: float) -> None:
        """It has its first token, or has ended without one. Raises KeyError for one that is not there."""
        if next(iter(self._tokens)) == number:
            self._since = now
        self._total -= self._tokens.pop(number)

    def ahead(self, now: float, s_per_token: float) -> int:
        """Tokens still to be computed: of the first prompt only as many as the time since it began leaves."""
        if not self._tokens:
            return 0
        first = next(iter(self._tokens.values()))
        done = int((now - self._since) / s_per_token) if s_per_token > 0.0 else 0
        return self._total - min(first, done)
