"""Limits of keys: sliding windows of requests and tokens. Sans-I/O.

Before a request runs, the most tokens that its answer may have are held; when the answer has ended, the used
tokens replace the held ones. So a window never exceeds its limit, however many requests run at once. A Redis
script has the same rules (``gateway/state/limits_redis.py``); one conformance suite tests both.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from accounting.keys import MAX_KEYS, Budget, KeyLimits
from accounting.values import DAY_S

MINUTE_S = 60
# A window has this many steps: of 1 s in a minute, of 10 min in a day. Used tokens count until the end of
# their step has left the window. So a limit is exact, and used tokens are released up to one step late.
STEPS_OF_MINUTE = 60
STEPS_OF_DAY = 144
MAX_HOLD_S = DAY_S  # longest hold of tokens for a request that never settles: no answer takes a day
# The retry time when other requests hold the tokens: most of them are released when these requests end.
RETRY_HELD_S = 1.0


@dataclass(frozen=True, slots=True)
class Limit:
    """One kind of limit: its setting's name, its window, and whether it counts tokens or requests."""

    name: str
    period_s: int
    step_s: int
    of_tokens: bool


LIMITS = (
    Limit("requests_per_minute", MINUTE_S, MINUTE_S // STEPS_OF_MINUTE, of_tokens=False),
    Limit("tokens_per_minute", MINUTE_S, MINUTE_S // STEPS_OF_MINUTE, of_tokens=True),
    Limit("tokens_per_day", DAY_S, DAY_S // STEPS_OF_DAY, of_tokens=True),
)


# Budgets are counted like tokens, under separate ids. With period 0 and one step of a day, the window is the
# UTC day itself. Each month has its own id, which names the month, so its use never has to leave the window.
BUDGETS = (
    Limit("requests", MINUTE_S, MINUTE_S, of_tokens=False),
    Limit("usd_per_day", 0, DAY_S, of_tokens=True),
    Limit("usd_per_month", 0, 10**11, of_tokens=True),
)


def kinds_of(limits: KeyLimits | Budget) -> tuple[Limit, ...]:
    """The kinds of limit, in the order of :func:`amounts`."""
    return BUDGETS if isinstance(limits, Budget) else LIMITS


def amounts(limits: KeyLimits | Budget) -> tuple[int | None, ...]:
    """The values of the limits, in the order of :func:`kinds_of`."""
    if isinstance(limits, Budget):
        return None, limits.nanousd_per_day, limits.nanousd_per_month
    return limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day


class HoldId(msgspec.Struct, frozen=True):
    """Identifies the hold of one request: its process, and a number within that process."""

    holder: str
    number: int


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """The requests to count now and the tokens to hold under ``hold``; zero of both only reads the limits."""

    requests: int = 0
    tokens: int = 0
    hold: HoldId | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """The tokens that a request used. ``hold`` is ``None`` when the store could not be reached; ``at`` is the
    whole second of the store's clock at which the tokens were held, ``None`` for now.
    """

    key_id: str
    limits: KeyLimits | Budget
    hold: HoldId | None
    at: int | None
    used: int


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit, by its setting's name, that a request would exceed. ``wait_s`` is the time until a retry;
    ``None`` when the request can never pass.
    """

    name: str
    limit: int
    asked: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """A limit's state, for response headers."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """Whether a request may pass: with an ``excess`` it may not, and nothing was counted. ``figures`` are the
    states of the limits afterwards, in the order of :func:`kinds_of`, ``None`` where there is no limit;
    ``at`` is the whole second of the decision on the deciding clock.
    """

    excess: Excess | None
    figures: tuple[Figures | None, ...]
    at: int


class _Held(msgspec.Struct, frozen=True):
    at: int
    tokens: int


class QuotaWindow:
    """The use within the last period: ``steps`` of ``[step number, amount]``, oldest first."""

    __slots__ = ("_used", "kind", "limit", "steps")

    def __init__(self, limit: int, kind: Limit, steps: Sequence[Sequence[int]] = ()) -> None:
        self.limit = limit
        self.kind = kind
        self.steps = [[number, amount] for number, amount in steps]
        self._used = sum(amount for _, amount in steps)

    def add(self, amount: int, at: float, now: float) -> None:
        """Count a use at time ``at``, unless its step has left the window."""
        number = int(at // self.kind.step_s)
        if self._leaves_at(number) <= now:
            return
        place = bisect_left(self.steps, [number])
        if place < len(self.steps) and self.steps[place][0] == number:
            self.steps[place][1] += amount
        else:
            self.steps.insert(place, [number, amount])
        self._used += amount

    def remaining(self, now: float, held: Sequence[_Held] = ()) -> int:
        self._drop(now)
        return max(0, self.limit - self._used - sum(one.tokens for one in self._counting(held, now)))

    def wait_s(self, amount: int, now: float) -> float | None:
        """Seconds until ``amount`` may be used if nothing else is used; ``None`` if it exceeds the limit.
        Held tokens may be released at any moment and are ignored; if only they are in the way, the wait is
        :data:`RETRY_HELD_S`.
        """
        if amount > self.limit:
            return None
        self._drop(now)
        over, wait_s = self._used + amount - self.limit, RETRY_HELD_S
        for number, one in self.steps:
            if over <= 0:
                break
            over -= one
            wait_s = self._leaves_at(number) - now
        return wait_s

    def reset_s(self, now: float, held: Sequence[_Held] = ()) -> float:
        """Seconds until the whole limit may be used again."""
        self._drop(now)
        steps = [number for number, one in self.steps if one]
        steps += [one.at // self.kind.step_s for one in self._counting(held, now)]
        last = max(steps, default=None)
        return 0.0 if last is None else self._leaves_at(last) - now

    def figures(self, now: float, held: Sequence[_Held] = ()) -> Figures:
        return Figures(self.limit, self.remaining(now, held), self.reset_s(now, held))

    def _counting(self, held: Sequence[_Held], now: float) -> Sequence[_Held]:
        """The holds that count: those within the window, if it is of tokens."""
        if not self.kind.of_tokens:
            return ()
        since = (now - self.kind.period_s) // self.kind.step_s * self.kind.step_s
        return [one for one in held if one.at >= since]

    def _leaves_at(self, number: int) -> int:
        return (number + 1) * self.kind.step_s + self.kind.period_s

    def _drop(self, now: float) -> None:
        """Drop what has left the window; a use after ``now``, whose clock was set back, is one of now."""
        latest = int(now // self.kind.step_s)
        for step in reversed(self.steps):
            if step[0] <= latest:
                break
            step[0] = latest
        while self.steps and self._leaves_at(self.steps[0][0]) <= now:
            self._used -= self.steps.pop(0)[1]


class _Stored(msgspec.Struct, array_like=True):
    """A key's usage as it is stored: the steps of each window, and the holds (holder, number, at, tokens)."""

    windows: list[list[list[int]]]
    held: list[tuple[str, int, int, int]]


class KeyUsage:
    """The use of one key; ``stored`` is a result of :meth:`encode`, also under other limits: what was counted
    for a limit that is not set now is kept.
    """

    __slots__ = ("_held", "_kept", "_windows", "limits")

    def __init__(self, limits: KeyLimits | Budget, stored: bytes | None = None) -> None:
        self.limits = limits
        state = _Stored([[], [], []], []) if stored is None else msgspec.msgpack.decode(stored, type=_Stored)
        self._windows = tuple(
            None if limit is None else QuotaWindow(limit, kind, steps)
            for kind, limit, steps in zip(kinds_of(limits), amounts(limits), state.windows, strict=True)
        )
        self._kept = state.windows
        self._held = {HoldId(who, number): _Held(at, tokens) for who, number, at, tokens in state.held}

    def encode(self) -> bytes:
        pairs = zip(self._windows, self._kept, strict=True)
        windows = [kept if window is None else window.steps for window, kept in pairs]
        held = [(one.holder, one.number, hold.at, hold.tokens) for one, hold in self._held.items()]
        return msgspec.msgpack.encode(_Stored(windows, held))

    def take(self, request: QuotaRequest, now: float, *, alive: Callable[[str], bool] = bool) -> QuotaVerdict:
        """Count the requests and hold the tokens, or do neither when a limit would be exceeded. Holds whose
        holder is not ``alive`` are dropped first.
        """
        self._forget(now, alive)
        excess = self._excess(request, now, tuple(self._held.values()))
        if excess is None:
            self.count(request, now)
        held = tuple(self._held.values())
        figures = tuple(None if window is None else window.figures(now, held) for window in self._windows)
        return QuotaVerdict(excess, figures, int(now))

    def count(self, request: QuotaRequest, now: float) -> None:
        """Count the requests and hold the tokens without a check: the decision was made elsewhere."""
        requests = self._windows[0]
        if request.requests and requests is not None:
            requests.add(request.requests, now, now)
        if request.tokens and request.hold is not None:
            self._held[request.hold] = _Held(int(now), request.tokens)

    def settle(self, settlement: Settlement, now: float) -> None:
        """Replace the held tokens by the used tokens."""
        held = None if settlement.hold is None else self._held.pop(settlement.hold, None)
        at = held.at if held is not None else settlement.at if settlement.at is not None else now
        for window in filter(None, self._windows):
            if window.kind.of_tokens and settlement.used:
                window.add(settlement.used, at, now)

    def _excess(self, request: QuotaRequest, now: float, held: Sequence[_Held]) -> Excess | None:
        """The exceeded limit with the longest wait."""
        over: list[Excess] = []
        for window in filter(None, self._windows):
            asked = request.tokens if window.kind.of_tokens else request.requests
            if asked and window.remaining(now, held) < asked:
                over.append(Excess(window.kind.name, window.limit, asked, window.wait_s(asked, now)))
        return max(over, key=lambda one: float("inf") if one.wait_s is None else one.wait_s, default=None)

    def _forget(self, now: float, alive: Callable[[str], bool]) -> None:
        held = self._held.items()
        gone = [one for one, hold in held if hold.at + MAX_HOLD_S <= now or not alive(one.holder)]
        for one in gone:
            del self._held[one]


class Quotas:
    """The use of keys in this process alone; beyond ``max_keys`` the least recently used key is evicted."""

    def __init__(self, *, clock: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._tallies: OrderedDict[str, KeyUsage] = OrderedDict()

    def take(self, key_id: str, limits: KeyLimits | Budget, request: QuotaRequest) -> QuotaVerdict:
        return self._tally(key_id, limits).take(request, self._clock())

    def count(self, key_id: str, limits: KeyLimits | Budget, request: QuotaRequest) -> None:
        self._tally(key_id, limits).count(request, self._clock())

    def settle(self, settlement: Settlement) -> None:
        # The key's limits may have changed since the request began.
        tally = self._tallies.get(settlement.key_id) or self._tally(settlement.key_id, settlement.limits)
        tally.settle(settlement, self._clock())

    def _tally(self, key_id: str, limits: KeyLimits | Budget) -> KeyUsage:
        tally = self._tallies.get(key_id)
        if tally is None or tally.limits != limits:
            tally = self._tallies[key_id] = KeyUsage(limits, None if tally is None else tally.encode())
        self._tallies.move_to_end(key_id)
        while len(self._tallies) > self._max_keys:
            self._tallies.popitem(last=False)
        return tally
