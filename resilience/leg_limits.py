"""Limits of each leg of a fallback chain, so that an overload does not become expensive.

A leg has a bound on concurrent requests and on their cost within a minute. A request's maximal cost is
reserved when it enters and replaced by its real cost when it ends. Sans-I/O: nothing waits here; a leg at its
limit is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

# The sliding minute is stored in steps of a second: at most 61 steps per leg, whatever the traffic.
WINDOW_S = 60
STEP_S = 1.0

SkipReason = Literal["concurrency", "spend"]


# The cost in nano US dollars (10⁻⁹) of an answer's tokens: input, output, and of the input those found in a
# cache and those written to it.
Cost = Callable[[int, int, int, int], int]


def free(*tokens: int) -> int:
    """The cost where there is no price."""
    return 0


@dataclass(frozen=True, slots=True)
class LegLimit:
    """The bounds of one leg; ``None`` is no bound. Reservations count as spent."""

    max_concurrency: int | None = None
    max_spend_nanousd_per_minute: int | None = None
    cost: Cost = free


@dataclass(frozen=True, slots=True)
class LegSkipped:
    """A leg was skipped because it was at its limit."""

    leg: str
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class LegFigures:
    """The state of a leg: requests in progress, their reservations, cost of the last minute."""

    in_use: int
    reserved_nanousd: int
    spent_nanousd: int


class Permit:
    """A place in a leg, given back at the end of its ``with`` block.

    Without :meth:`settle` the reservation counts as spent: the cost of a broken or cancelled call is not
    known, and the limit must hold in the worst case.
    """

    def __init__(self, leg: _Leg, reserved_nanousd: int) -> None:
        self._leg = leg
        self._reserved = reserved_nanousd
        self._cost = reserved_nanousd

    def settle(
        self,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
        cache_write_tokens: int = 0,
    ) -> None:
        """Report the real usage; the last report counts."""
        self._cost = self._leg.limit.cost(input_tokens, output_tokens, cached_tokens, cache_write_tokens)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self._leg.leave(self._reserved, self._cost)


class LegLimits:
    """Lets requests into the legs of fallback chains.

    Args:
        limits: by the leg's name; a leg that is not named has no bounds.
        emit: takes an event for each skipped leg; must not block.
    """

    def __init__(
        self,
        limits: Mapping[str, LegLimit],
        *,
        clock: Callable[[], float],
        emit: Callable[[LegSkipped], None],
    ) -> None:
        self._legs = {name: _Leg(limit, clock) for name, limit in limits.items()}
        self._unbounded = _Leg(LegLimit(), clock)
        self._emit = emit

    def enter(self, leg: str, input_tokens: int, output_tokens: int) -> Permit | None:
        """A place in the leg for a request of at most that many tokens; ``None`` at its limit."""
        # A leg ``pool/model`` is one of the models of a pool, which share its bounds.
        bounds = self._legs.get(leg.partition("/")[0], self._unbounded)
        # Tokens that are written to a cache are the dearest.
        reserved = bounds.limit.cost(input_tokens, output_tokens, 0, input_tokens)
        reason = bounds.try_enter(reserved)
        if reason is not None:
            self._emit(LegSkipped(leg, reason))
            return None
        return Permit(bounds, reserved)

    def free(self) -> Permit:
        """A place in a leg without bounds."""
        self._unbounded.try_enter(0)
        return Permit(self._unbounded, 0)

    def figures(self) -> Mapping[str, LegFigures]:
        return {name: leg.figures() for name, leg in self._legs.items()}


@dataclass(slots=True, eq=False)
class _Leg:
    limit: LegLimit
    clock: Callable[[], float]
    in_use: int = 0
    reserved: int = 0
    spent: int = 0
    # Pairs of a second's number and the cost in it, oldest first.
    steps: deque[list[int]] = field(default_factory=deque)

    def try_enter(self, reserve: int) -> SkipReason | None:
        """Take a place and reserve; returns the bound that prevents it, if one does."""
        self._forget()
        limit = self.limit
        if limit.max_concurrency is not None and self.in_use >= limit.max_concurrency:
            return "concurrency"
        most = limit.max_spend_nanousd_per_minute
        if most is not None and self.reserved + self.spent + reserve > most:
            return "spend"
        self.in_use += 1
        self.reserved += reserve
        return None

    def leave(self, reserved: int, cost: int) -> None:
        """Give the place back; ``cost`` replaces the reservation."""
        self._forget()
        self.in_use -= 1
        self.reserved -= reserved
        if cost:
            step = int(self.clock() // STEP_S)
            if not self.steps or self.steps[-1][0] != step:
                self.steps.append([step, 0])
            self.steps[-1][1] += cost
            self.spent += cost

    def figures(self) -> LegFigures:
        self._forget()
        return LegFigures(self.in_use, self.reserved, self.spent)

    def _forget(self) -> None:
        # A step is forgotten when the whole of it is older than the window.
        oldest = int(self.clock() // STEP_S) - WINDOW_S
        while self.steps and self.steps[0][0] < oldest:
            self.spent -= self.steps.popleft()[1]
