"""The default limits of keys without their own limits, per process."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass

from msgspec import Struct

from accounting.keys import NO_BUDGET, KeyLimits
from accounting.quotas import MINUTE_S
from gateway.contracts.values import CALLER, Caller
from gateway.errors import RateLimited

NANOUSD = 10**9


@dataclass(eq=False)
class Ceilings:
    """Counts the use of callers' keys in one-minute windows, common to all keys, and their running requests.

    A ceiling protects other callers from a key with runaway traffic. Each process counts on its own, so a
    ceiling needs no call of the state store. Only keys of the role ``caller`` have ceilings.

    Args:
        limits: requests and tokens per minute; a key's own limit replaces the one of the same kind.
        concurrent: most concurrent requests of one key; ``None``: any number.
        nanousd_per_minute: most money; a key's budget replaces it. ``None``: any amount.
    """

    limits: KeyLimits
    concurrent: int | None
    _: KW_ONLY
    clock: Callable[[], float]
    nanousd_per_minute: int | None = None

    def __post_init__(self) -> None:
        self._ends_at = 0.0
        # By limit and key, so bounded by the number of keys.
        self._used: Counter[tuple[str, str]] = Counter()
        self._running: Counter[str] = Counter()

    def count_request(self, caller: Caller) -> None:
        """Count a request. Raises RateLimited."""
        if caller.role is not CALLER:
            return
        limit = self.limits.requests_per_minute
        if limit is not None and caller.limits.requests_per_minute is None:
            self._count("requests_per_minute", limit, caller, 1)

    def count_use(self, caller: Caller, tokens: int, cost: Callable[[], int] = int) -> None:
        """Count the tokens that a request is expected to use and what it may cost, in nano US dollars. Raises
        RateLimited.
        """
        if caller.role is not CALLER:
            return
        limit = self.limits.tokens_per_minute
        if limit is not None and caller.limits.tokens_per_minute is None:
            self._count("tokens_per_minute", limit, caller, tokens)
        if self.nanousd_per_minute is not None and caller.budget == NO_BUDGET:
            self._count("usd_per_minute", self.nanousd_per_minute, caller, cost(), NANOUSD)

    def running(self, caller: Caller) -> AbstractContextManager[None]:
        """Return a context manager in which a request of the key runs. Raises RateLimited."""
        limit, key_id = self.concurrent, caller.key_id
        if limit is None or caller.role is not CALLER:
            return _UNCOUNTED
        if self._running[key_id] >= limit:
            raise RateLimited(
                f"concurrent_requests: {limit} requests of the key run here, which is the limit; "
                "send fewer at a time",
                retry_after_ms=1_000,
            )
        return Running(self._running, key_id)

    def _count(self, name: str, limit: int, caller: Caller, amount: int, unit: int = 1) -> None:
        now = self.clock()
        if now >= self._ends_at:
            self._used.clear()
            self._ends_at = now + MINUTE_S
        before = self._used[name, caller.key_id]
        if before and before + amount > limit:
            wait_s = self._ends_at - now
            raise RateLimited(
                f"{name}: the request needs {amount / unit:.15g}, the limit of keys without one of their own "
                f"is {limit / unit:.15g}; too little is left now; try again in {math.ceil(wait_s)} s",
                retry_after_ms=max(1, math.ceil(wait_s * 1000)),
            )
        self._used[name, caller.key_id] = before + amount


class Running(Struct, eq=False):
    """Counts a running request until its block ends."""

    _running: Counter[str]
    _key_id: str

    def __enter__(self) -> None:
        self._running[self._key_id] += 1

    def __exit__(self, *_: object) -> None:
        running = self._running
        running[self._key_id] -= 1
        if not running[self._key_id]:
            del running[self._key_id]


_UNCOUNTED = nullcontext()
NO_CEILINGS = Ceilings(KeyLimits(), None, clock=lambda: 0.0)
