"""Keys' limits as requests meet them: what is over them is 429, never an answer of the fallback chain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from accounting.keys import NO_LIMITS
from accounting.quotas import Excess, Quotas, Reservation
from gateway.contracts.values import Caller, GenerateRequest
from gateway.errors import QuotaExceeded, RateLimited
from gateway.meter import Meter

Header = tuple[bytes, bytes]
_DAY = "tokens_per_day"


class KeyLimiter:
    """Implements ``gateway.ports.RequestLimiter``, and reserves tokens for the journey.

    Args:
        quotas: the windows; ``None``: nothing is limited.
    """

    def __init__(self, quotas: Quotas | None = None) -> None:
        self._quotas = quotas

    def enter(self, caller: Caller) -> None:
        """Count a request. Raises RateLimited."""
        if self._quotas is None or caller.limits == NO_LIMITS:
            return
        excess = self._quotas.enter(caller.key_id, caller.limits)
        if excess is not None:
            raise _refusal(excess)

    def headers(self, caller: Caller) -> list[Header]:
        """``x-ratelimit-*`` of a limited key; whole seconds, rounded up."""
        if self._quotas is None or caller.limits == NO_LIMITS:
            return []
        told: list[Header] = []
        for name, figures in self._quotas.figures(caller.key_id, caller.limits).items():
            values = {
                "limit": figures.limit,
                "remaining": figures.remaining,
                "reset": math.ceil(figures.reset_s),
            }
            told += [(f"x-ratelimit-{word}-{name}".encode(), str(n).encode()) for word, n in values.items()]
        return told

    @contextmanager
    def reserve(
        self, request: GenerateRequest, input_tokens: int, max_output_tokens: int, meter: Meter
    ) -> Iterator[Reservation | None]:
        """Hold the most that the request may use while the block runs; ``None`` for an unlimited key.

        A block that ends without ``settle`` has used its prompt and what was generated, or nothing when no
        token was.

        Raises:
            RateLimited: over the tokens of a minute.
            QuotaExceeded: over the tokens of a day.
        """
        caller = request.caller
        if self._quotas is None or caller.limits == NO_LIMITS:
            yield None
            return
        held = self._quotas.reserve(caller.key_id, caller.limits, input_tokens + max_output_tokens)
        if isinstance(held, Excess):
            raise _refusal(held)
        try:
            yield held
        finally:
            held.settle(input_tokens + meter.tokens if meter.tokens else 0)


def _refusal(excess: Excess) -> RateLimited | QuotaExceeded:
    wait_s = excess.wait_s
    hint = "ask for less" if wait_s is None else f"come again in {math.ceil(wait_s)} s"
    message = f"{excess.name}: the request needs {excess.asked}, the key's limit is {excess.limit}; {hint}"
    error = QuotaExceeded if excess.name == _DAY else RateLimited
    return error(message, retry_after_ms=None if wait_s is None else max(1, math.ceil(wait_s * 1000)))
