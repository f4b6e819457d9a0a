"""Applies keys' limits to requests: over a limit is 429, never an answer of the fallback chain."""

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from accounting.events import QuotaDecided, QuotaEvent, QuotaSettled
from accounting.keys import NO_LIMITS, KeyLimits
from accounting.quotas import LIMITS, Excess, Figures, HoldId, QuotaRequest, Quotas, Settlement
from gateway.contracts.values import Caller
from gateway.errors import QuotaExceeded, RateLimited
from gateway.generation.answer_stream import AnswerStream
from gateway.keys.shared_limits import SharedLimits

Header = tuple[bytes, bytes]
_DAY = "tokens_per_day"
_LOCAL = "local"


def duration(seconds: float) -> str:
    """As OpenAI writes it (``6m0s``), in whole seconds, rounded up."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}h{minute}m{second}s" if hour else f"{minute}m{second}s" if minute else f"{second}s"


class TokenReservation:
    """Tokens reserved for a request, counted as used until it is settled."""

    __slots__ = ("_settle", "tokens")

    def __init__(self, tokens: int, settle: Callable[[int], None]) -> None:
        self.tokens = tokens
        self._settle: Callable[[int], None] | None = settle

    def settle(self, used: int) -> None:
        """Replace the reservation by the tokens used; a second call changes nothing."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(used)


class KeyLimiter:
    """Counts keys' requests, and reserves tokens for the journey.

    Nothing is counted for a key without limits.

    Args:
        quotas: this process' own counts; ``None``: nothing is limited.
        shared: all processes' counts; ``None``: this is the only process. While they cannot be reached, this
            process decides by their last answer and by its own counts, which it always updates.
    """

    def __init__(
        self,
        quotas: Quotas | None = None,
        shared: SharedLimits | None = None,
        *,
        emit: Callable[[QuotaEvent], None] = lambda event: None,
    ) -> None:
        self._quotas = quotas
        self._shared = shared
        self._emit = emit
        self._numbers = itertools.count(1)

    async def enter(self, caller: Caller) -> None:
        """Count a request. Raises RateLimited."""
        quotas, limits = self._quotas, caller.limits
        if quotas is None or limits.requests_per_minute is None:
            return
        ask = QuotaRequest(requests=1)
        verdict = None if self._shared is None else await self._shared.count(caller.key_id, limits)
        if verdict is None:
            self._decide("request", quotas, caller.key_id, limits, ask)
            return
        if verdict.excess is None:
            # Counted here too, in case the shared counts become unreachable.
            quotas.count(caller.key_id, limits, ask)
        self._decided("request", verdict.excess, shared=True)

    async def headers(self, caller: Caller) -> list[Header]:
        """``x-ratelimit-*`` of a limited key."""
        if self._quotas is None or caller.limits == NO_LIMITS:
            return []
        headers: list[Header] = []
        figures_now = await self._figures(self._quotas, caller.key_id, caller.limits)
        for name, figures in _tightest(figures_now).items():
            values = {
                "limit": figures.limit,
                "remaining": figures.remaining,
                "reset": duration(figures.reset_s),
            }
            headers += [
                (f"x-ratelimit-{word}-{name}".encode(), str(n).encode()) for word, n in values.items()
            ]
        return headers

    async def used(self, key_id: str, limits: KeyLimits) -> dict[str, int]:
        """What is used or reserved of a key's limits now, by the limits' names."""
        if self._quotas is None or limits == NO_LIMITS:
            return {}
        figures = await self._figures(self._quotas, key_id, limits)
        return {
            kind.name: one.limit - one.remaining
            for kind, one in zip(LIMITS, figures, strict=True)
            if one is not None
        }

    async def spend(self, caller: Caller, tokens: int) -> None:
        """Count tokens as used. Raises as :meth:`reserve`."""
        reservation = await self.reserve(caller, tokens) if tokens else None
        if reservation is not None:
            reservation.settle(tokens)

    async def reserve(self, caller: Caller, tokens: int) -> TokenReservation | None:
        """Reserve the most that a request may use; ``None`` for a key without token limits.

        Raises:
            RateLimited: over the tokens per minute.
            QuotaExceeded: over the tokens per day.
        """
        quotas, limits, key_id = self._quotas, caller.limits, caller.key_id
        if quotas is None or (limits.tokens_per_minute is None and limits.tokens_per_day is None):
            return None
        verdict, hold = None, None
        if self._shared is not None:
            verdict, hold = await self._shared.hold(key_id, limits, tokens)
        own = hold or HoldId(_LOCAL, next(self._numbers))
        ask = QuotaRequest(tokens=tokens, hold=own)
        if verdict is None:
            self._decide("tokens", quotas, key_id, limits, ask)
        else:
            self._decided("tokens", verdict.excess, shared=True)
            quotas.count(key_id, limits, ask)

        def settle(used: int) -> None:
            quotas.settle(Settlement(key_id, limits, own, None, used))
            if self._shared is not None:
                self._shared.settle(key_id, limits, hold, verdict, tokens, used)
            self._emit(QuotaSettled(tokens, used))

        return TokenReservation(tokens, settle)

    def _decide(self, kind: str, quotas: Quotas, key_id: str, limits: KeyLimits, ask: QuotaRequest) -> None:
        """Decide without the store: by its last answer, and by this process' own counts."""
        excess = None if self._shared is None else self._shared.last_known(key_id, ask)
        if excess is None:
            excess = quotas.take(key_id, limits, ask).excess
        self._decided(kind, excess, shared=False)
        if self._shared is not None:
            self._shared.count_passed(key_id, ask)

    async def _figures(self, quotas: Quotas, key_id: str, limits: KeyLimits) -> tuple[Figures | None, ...]:
        if self._shared is not None:
            figures = await self._shared.figures(key_id, limits)
            if figures is not None:
                return figures
        return quotas.take(key_id, limits, QuotaRequest()).figures

    def _decided(self, kind: str, excess: Excess | None, *, shared: bool) -> None:
        self._emit(QuotaDecided(kind, None if excess is None else excess.name, shared))
        if excess is not None:
            raise _refusal(excess)


class Settling(AbstractContextManager[TokenReservation | None]):
    """Settle the reservation when the block ends.

    A block that ends without ``settle`` has used its prompt and the generated tokens; nothing when none was
    generated.
    """

    __slots__ = ("_held", "_input_tokens", "_stream")

    def __init__(self, held: TokenReservation | None, input_tokens: int, stream: AnswerStream) -> None:
        self._held = held
        self._input_tokens = input_tokens
        self._stream = stream

    def __enter__(self) -> TokenReservation | None:
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            tokens = self._stream.tokens
            self._held.settle(self._input_tokens + tokens if tokens else 0)


def _tightest(figures: tuple[Figures | None, ...]) -> Mapping[str, Figures]:
    """``requests`` and ``tokens``; of two token limits the one that leaves less."""
    found: dict[str, Figures] = {}
    for kind, one in zip(LIMITS, figures, strict=True):
        name = "tokens" if kind.of_tokens else "requests"
        if one is not None and (name not in found or one.remaining < found[name].remaining):
            found[name] = one
    return found


def _refusal(excess: Excess) -> RateLimited | QuotaExceeded:
    wait_s = excess.wait_s
    hint = "ask for less" if wait_s is None else f"come again in {math.ceil(wait_s)} s"
    message = f"{excess.name}: the request needs {excess.asked}, the key's limit is {excess.limit}; {hint}"
    error = QuotaExceeded if excess.name == _DAY else RateLimited
    return error(message, retry_after_ms=None if wait_s is None else max(1, math.ceil(wait_s * 1000)))
