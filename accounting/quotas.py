"""How much a key has asked for: sliding windows of requests and tokens, in this process.

Tokens are reserved before they are generated, at the most that an answer may have, and corrected when the
answer is there. So a window never holds more than its limit, however many requests run at once. Sans-I/O:
nothing waits here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from accounting.keys import MAX_KEYS, KeyLimits

MINUTE_S = 60.0
DAY_S = 86_400.0
# A window is kept in so many steps, 1 s of a minute and 10 min of a day; what was used counts until the end
# of its step has left the window, so a limit is kept exactly and what was used comes back up to a step late.
STEPS_OF_MINUTE = 60
STEPS_OF_DAY = 144


@dataclass(slots=True)
class _Step:
    number: int
    amount: int


class Window:
    """What was used within the last ``period_s``.

    Args:
        limit: most of any period.
        period_s: its length.
        steps: into how many it is cut.
    """

    __slots__ = ("_step_s", "_steps", "_used", "limit", "period_s")

    def __init__(self, limit: int, period_s: float, steps: int) -> None:
        self.limit = limit
        self.period_s = period_s
        self._step_s = period_s / steps
        self._steps: deque[_Step] = deque()
        self._used = 0

    def remaining(self, now: float) -> int:
        """What may be used now."""
        self._drop(now)
        return max(0, self.limit - self._used)

    def use(self, amount: int, now: float) -> _Step:
        """Count it; the step is for :meth:`correct`."""
        number = int(now // self._step_s)
        if not self._steps or self._steps[-1].number < number:
            self._steps.append(_Step(number, 0))
        step = self._steps[-1]
        step.amount += amount
        self._used += amount
        return step

    def correct(self, step: _Step, by: int, now: float) -> None:
        """Change what was counted in a step; one that has left the window is forgotten already."""
        self._drop(now)
        if self._steps and step.number >= self._steps[0].number:
            step.amount += by
            self._used += by

    def wait_s(self, amount: int, now: float) -> float | None:
        """Seconds until so much may be used if nothing else is; ``None``: never, it is over the limit."""
        if amount > self.limit:
            return None
        self._drop(now)
        over, until = self._used + amount - self.limit, now
        for step in self._steps:
            if over <= 0:
                break
            over -= step.amount
            until = self._leaves_at(step)
        return max(0.0, until - now)

    def reset_s(self, now: float) -> float:
        """Seconds until all of the limit may be used again."""
        self._drop(now)
        return max(0.0, self._leaves_at(self._steps[-1]) - now) if self._used else 0.0

    def _leaves_at(self, step: _Step) -> float:
        return (step.number + 1) * self._step_s + self.period_s

    def _drop(self, now: float) -> None:
        while self._steps and self._leaves_at(self._steps[0]) <= now:
            self._used -= self._steps.popleft().amount


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


class _Account:
    """The windows of one key."""

    __slots__ = ("limits", "requests", "tokens")

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.requests = _windows(("requests_per_minute", limits.requests_per_minute))
        self.tokens = _windows(
            ("tokens_per_minute", limits.tokens_per_minute), ("tokens_per_day", limits.tokens_per_day)
        )


def _windows(*limits: tuple[str, int | None]) -> dict[str, Window]:
    return {
        name: Window(limit, DAY_S, STEPS_OF_DAY)
        if name.endswith("day")
        else Window(limit, MINUTE_S, STEPS_OF_MINUTE)
        for name, limit in limits
        if limit is not None
    }


class Reservation:
    """Tokens that a request may use; counted as used until it is settled."""

    __slots__ = ("_clock", "_held", "_reserved")

    def __init__(self, held: list[tuple[Window, _Step]], reserved: int, clock: Callable[[], float]) -> None:
        self._held = held
        self._reserved = reserved
        self._clock = clock

    def settle(self, used: int) -> None:
        """What it did use; a second call changes nothing."""
        now = self._clock()
        for window, step in self._held:
            window.correct(step, used - self._reserved, now)
        self._held = []


class Quotas:
    """The windows of all keys that have limits. Lives on the event loop.

    Args:
        clock: monotonic seconds.
        max_keys: the least recently used beyond it begin anew.
    """

    def __init__(self, *, clock: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def enter(self, key_id: str, limits: KeyLimits) -> Excess | None:
        """Count a request, unless it is one too many: then say why, and count nothing."""
        windows, now = self._account(key_id, limits).requests, self._clock()
        excess = _excess(windows, 1, now)
        if excess is None:
            for window in windows.values():
                window.use(1, now)
        return excess

    def reserve(self, key_id: str, limits: KeyLimits, tokens: int) -> Reservation | Excess:
        """Count tokens as used, unless they are too many: then say why, and count nothing."""
        windows, now = self._account(key_id, limits).tokens, self._clock()
        excess = _excess(windows, tokens, now)
        if excess is not None:
            return excess
        held = [(window, window.use(tokens, now)) for window in windows.values()]
        return Reservation(held, tokens, self._clock)

    def figures(self, key_id: str, limits: KeyLimits) -> dict[str, Figures]:
        """How ``requests`` and ``tokens`` stand; of two limits of tokens the one that leaves less."""
        account, now = self._account(key_id, limits), self._clock()
        found: dict[str, Figures] = {}
        for name, windows in (("requests", account.requests), ("tokens", account.tokens)):
            if windows:
                tightest = min(windows.values(), key=lambda window: window.remaining(now))
                found[name] = Figures(tightest.limit, tightest.remaining(now), tightest.reset_s(now))
        return found

    def _account(self, key_id: str, limits: KeyLimits) -> _Account:
        account = self._accounts.get(key_id)
        if account is None or account.limits != limits:
            account = self._accounts[key_id] = _Account(limits)
        self._accounts.move_to_end(key_id)
        while len(self._accounts) > self._max_keys:
            self._accounts.popitem(last=False)
        return account


def _excess(windows: dict[str, Window], amount: int, now: float) -> Excess | None:
    """The limit that keeps the request away longest."""
    over = [
        Excess(name, window.limit, amount, window.wait_s(amount, now))
        for name, window in windows.items()
        if window.remaining(now) < amount
    ]
    return max(over, key=lambda one: float("inf") if one.wait_s is None else one.wait_s, default=None)
