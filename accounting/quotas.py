"""How much a key has asked for: sliding windows of requests and tokens. Sans-I/O: nothing waits here.

Tokens are held before they are generated, at the most that an answer may have, and replaced by what was used
when the answer is there. So a window never holds more than its limit, however many requests run at once. What
a process held that is gone counts no longer. Redis decides by the same rules in a script of its own
(``gateway/state/limits_redis.py``); one conformance suite runs over both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from accounting.keys import MAX_KEYS, KeyLimits

MINUTE_S = 60
DAY_S = 86_400
# A window is kept in so many steps, 1 s of a minute and 10 min of a day; what was used counts until the end
# of its step has left the window, so a limit is kept exactly and what was used comes back up to a step late.
STEPS_OF_MINUTE = 60
STEPS_OF_DAY = 144
# Longest that tokens are held for a request that is never heard of again: no answer takes a day.
MAX_HOLD_S = DAY_S
# When to come again for tokens that others only hold: they get back most of them when they end.
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Limit:
    """One of a key's limits: its name as admins set it, its window, and what it counts."""

    name: str
    period_s: int
    step_s: int
    of_tokens: bool


LIMITS = (
    Limit("requests_per_minute", MINUTE_S, MINUTE_S // STEPS_OF_MINUTE, of_tokens=False),
    Limit("tokens_per_minute", MINUTE_S, MINUTE_S // STEPS_OF_MINUTE, of_tokens=True),
    Limit("tokens_per_day", DAY_S, DAY_S // STEPS_OF_DAY, of_tokens=True),
)


def amounts(limits: KeyLimits) -> tuple[int | None, ...]:
    """A key's limits in the order of :data:`LIMITS`."""
    return limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day


@dataclass(frozen=True, slots=True)
class HoldId:
    """Names what is held for one request: by which process, and its number there."""

    holder: str
    number: int


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """What a request needs; nothing of both: only a look at how the limits stand.

    Args:
        requests: to count at once.
        tokens: to hold under ``hold``.
    """

    requests: int = 0
    tokens: int = 0
    hold: HoldId | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a request did use.

    Args:
        hold: what was held for it; ``None``: nothing, the limits could not be asked then.
        at: whole seconds of the store's clock at which it was held; ``None``: now.
        used: tokens.
        sure: it is told for the first time. One that may have been told counts only if it is still held.
    """

    key_id: str
    limits: KeyLimits
    hold: HoldId | None
    at: int | None
    used: int
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that a request would go beyond.

    Args:
        name: the limit's, as admins set it.
        limit: how much it is.
        asked: how much the request needs.
        wait_s: when it may come again; ``None``: never as it is.
    """

    name: str
    limit: int
    asked: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """How a limit stands: for the headers."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """Whether a request may pass, and how the limits stand behind it.

    Args:
        excess: why it may not; nothing was counted then.
        figures: in the order of :data:`LIMITS`; ``None`` where there is no limit.
        at: whole seconds of the clock that decided.
    """

    excess: Excess | None
    figures: tuple[Figures | None, ...]
    at: int


@dataclass(frozen=True, slots=True)
class _Held:
    at: int
    tokens: int


class QuotaWindow:
    """What was used within the last period.

    Args:
        limit: most of any period.
        kind: which limit it is.
        steps: ``[number, amount]`` of what was counted, oldest first.
    """

    __slots__ = ("_kind", "_steps", "_used", "limit")

    def __init__(self, limit: int, kind: Limit, steps: Sequence[Sequence[int]] = ()) -> None:
        self.limit = limit
        self._kind = kind
        self._steps = [[number, amount] for number, amount in steps]
        self._used = sum(amount for _, amount in steps)

    @property
    def steps(self) -> list[list[int]]:
        """To be kept."""
        return self._steps

    def add(self, amount: int, at: float, now: float) -> None:
        """Count what was used at ``at``, unless that has left the window."""
        number = int(at // self._kind.step_s)
        if self._leaves_at(number) <= now:
            return
        place = bisect_left(self._steps, [number])
        if place < len(self._steps) and self._steps[place][0] == number:
            self._steps[place][1] += amount
        else:
            self._steps.insert(place, [number, amount])
        self._used += amount

    def remaining(self, now: float, held: Sequence[_Held] = ()) -> int:
        """What may be used now."""
        self._drop(now)
        return max(0, self.limit - self._used - sum(one.tokens for one in self._counting(held, now)))

    def wait_s(self, amount: int, now: float) -> float | None:
        """Seconds until so much may be used if nothing else is; ``None``: never, it is over the limit.

        What is held may come back at any moment, so it is not waited for: when nothing else is in the way, it
        is worth a look after :data:`LOOK_AGAIN_S`.
        """
        if amount > self.limit:
            return None
        self._drop(now)
        over, wait_s = self._used + amount - self.limit, LOOK_AGAIN_S
        for number, one in self._steps:
            if over <= 0:
                break
            over -= one
            wait_s = self._leaves_at(number) - now
        return wait_s

    def reset_s(self, now: float, held: Sequence[_Held] = ()) -> float:
        """Seconds until all of the limit may be used again."""
        self._drop(now)
        steps = [number for number, one in self._steps if one]
        steps += [one.at // self._kind.step_s for one in self._counting(held, now)]
        last = max(steps, default=None)
        return 0.0 if last is None else self._leaves_at(last) - now

    def _counting(self, held: Sequence[_Held], now: float) -> Sequence[_Held]:
        return [one for one in held if self._leaves_at(one.at // self._kind.step_s) > now]

    def _leaves_at(self, number: int) -> int:
        return (number + 1) * self._kind.step_s + self._kind.period_s

    def _drop(self, now: float) -> None:
        while self._steps and self._leaves_at(self._steps[0][0]) <= now:
            self._used -= self._steps.pop(0)[1]


class _Kept(msgspec.Struct, array_like=True):
    """A tally as it is stored: the windows' steps, and what is held."""

    windows: list[list[list[int]]]
    held: list[tuple[str, int, int, int]]


class KeyUsage:
    """What one key has used.

    Args:
        limits: the key's.
        kept: as :meth:`keep` gave it.
    """

    __slots__ = ("_held", "_windows", "limits")

    def __init__(self, limits: KeyLimits, kept: bytes | None = None) -> None:
        self.limits = limits
        stored = _Kept([[], [], []], []) if kept is None else msgspec.msgpack.decode(kept, type=_Kept)
        self._windows = tuple(
            None if limit is None else QuotaWindow(limit, kind, steps)
            for kind, limit, steps in zip(LIMITS, amounts(limits), stored.windows, strict=True)
        )
        self._held = {HoldId(who, number): _Held(at, tokens) for who, number, at, tokens in stored.held}

    def keep(self) -> bytes:
        """To be stored."""
        windows = [[] if window is None else window.steps for window in self._windows]
        held = [(one.holder, one.number, hold.at, hold.tokens) for one, hold in self._held.items()]
        return msgspec.msgpack.encode(_Kept(windows, held))

    def take(self, ask: QuotaRequest, now: float, *, alive: Callable[[str], bool] = bool) -> QuotaVerdict:
        """Count the requests and hold the tokens, unless one of the limits forbids it: then count nothing.

        Args:
            ask: what is needed.
            now: seconds.
            alive: whether a holder is there; what others held is forgotten.
        """
        self._forget(now, alive)
        excess = self._excess(ask, now, tuple(self._held.values()))
        if excess is None:
            self.count(ask, now)
        held = tuple(self._held.values())
        figures = tuple(
            None
            if window is None
            else Figures(
                window.limit,
                window.remaining(now, held if kind.of_tokens else ()),
                window.reset_s(now, held if kind.of_tokens else ()),
            )
            for kind, window in zip(LIMITS, self._windows, strict=True)
        )
        return QuotaVerdict(excess, figures, int(now))

    def count(self, ask: QuotaRequest, now: float) -> None:
        """Count the requests and hold the tokens whatever the limits are: it was decided elsewhere."""
        requests = self._windows[0]
        if ask.requests and requests is not None:
            requests.add(ask.requests, now, now)
        if ask.tokens and ask.hold is not None:
            self._held[ask.hold] = _Held(int(now), ask.tokens)

    def settle(self, told: Settlement, now: float) -> None:
        """Replace what is held by what was used."""
        held = None if told.hold is None else self._held.pop(told.hold, None)
        if held is None and not told.sure:
            return
        at = held.at if held is not None else told.at if told.at is not None else now
        for kind, window in zip(LIMITS, self._windows, strict=True):
            if kind.of_tokens and window is not None and told.used:
                window.add(told.used, at, now)

    def _excess(self, ask: QuotaRequest, now: float, held: Sequence[_Held]) -> Excess | None:
        """The limit that keeps the request away longest."""
        over: list[Excess] = []
        for kind, window in zip(LIMITS, self._windows, strict=True):
            asked, counting = (ask.tokens, held) if kind.of_tokens else (ask.requests, ())
            if window is not None and asked and window.remaining(now, counting) < asked:
                over.append(Excess(kind.name, window.limit, asked, window.wait_s(asked, now)))
        return max(over, key=lambda one: float("inf") if one.wait_s is None else one.wait_s, default=None)

    def _forget(self, now: float, alive: Callable[[str], bool]) -> None:
        gone = [
            one for one, hold in self._held.items() if hold.at + MAX_HOLD_S <= now or not alive(one.holder)
        ]
        for one in gone:
            del self._held[one]


class Quotas:
    """The tallies of this process alone. Lives on the event loop.

    Args:
        clock: monotonic seconds.
        max_keys: the least recently used beyond it begin anew.
    """

    def __init__(self, *, clock: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._tallies: OrderedDict[str, KeyUsage] = OrderedDict()

    def take(self, key_id: str, limits: KeyLimits, ask: QuotaRequest) -> QuotaVerdict:
        """Decide on a request."""
        return self._tally(key_id, limits).take(ask, self._clock())

    def count(self, key_id: str, limits: KeyLimits, ask: QuotaRequest) -> None:
        """Count what was decided elsewhere."""
        self._tally(key_id, limits).count(ask, self._clock())

    def settle(self, told: Settlement) -> None:
        """Replace what is held by what was used."""
        self._tally(told.key_id, told.limits).settle(told, self._clock())

    def _tally(self, key_id: str, limits: KeyLimits) -> KeyUsage:
        tally = self._tallies.get(key_id)
        if tally is None or tally.limits != limits:
            tally = self._tallies[key_id] = KeyUsage(limits)
        self._tallies.move_to_end(key_id)
        while len(self._tallies) > self._max_keys:
            self._tallies.popitem(last=False)
        return tally
