"""Keys' limits as all gateway processes share them: the store is asked, within a bound of time.

A store that is slow or away decides nothing: the caller of this goes on with what the store said last, while
that is fresh, and with this process' own counts (fail open), and the store is tried again after a while. What
requests used meanwhile is told to it afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from accounting.keys import MAX_KEYS, KeyLimits
from accounting.quota_events import LimitStoreAnswered, LimitStoreMissed, QuotaEvent, SettlementsLost
from accounting.quotas import (
    LIMITS,
    LOOK_AGAIN_S,
    Excess,
    Figures,
    HoldId,
    QuotaRequest,
    QuotaVerdict,
    Settlement,
)
from gateway.state.errors import StateUnavailable
from gateway.state.limits import LEASE_S, LimitStore

# Longest that a request waits for the store's decision. Redis answers in well under a millisecond.
TIMEOUT_S = 0.5
# After a miss the store is left alone for so long: of a store that hangs one request a second notices.
COOL_OFF_S = 1.0
RENEW_EVERY_S = LEASE_S / 5
# Settlements that wait for the store: with a store that is away, a minute of 160 requests a second.
MAX_OUTBOX = 10_000
# Told in one go, and not more often than that: so long a request that has ended holds what it did not use.
BATCH = 100
SETTLE_EVERY_S = 0.02
# Longest wait for the last ones when the gateway stops.
CLOSE_TIMEOUT_S = 1.0
# The process' first request of a key within so many seconds tells the figures to all others.
FIGURES_FOR_S = 2.0
# So long what the store said last also holds where it does not answer: over a timeout, the rest behind it and
# another timeout, as of a busy SQLite. Other processes' use is in it, which this one's own counts lack.
LAST_KNOWN_S = 5.0


@dataclass(slots=True)
class _Known:
    """How a key's limits stood when it was last asked; ``blocked_until`` of requests is certain.

    ``answered_at`` is when the store said so, ``at`` when this process last changed it.
    """

    figures: tuple[Figures | None, ...]
    at: float
    answered_at: float
    blocked_until: float = 0.0

    def use(self, requests: int, tokens: int) -> None:
        """Count what the store has not heard of; negative: what is free again."""
        self.figures = tuple(
            None
            if one is None
            else replace(
                one,
                remaining=max(0, min(one.limit, one.remaining - (tokens if kind.of_tokens else requests))),
            )
            for kind, one in zip(LIMITS, self.figures, strict=True)
        )


class SharedLimits:
    """Asks the store. Lives on the event loop.

    Args:
        store: decides.
        clock: monotonic seconds.
        unix_time: seconds since 1970, as the store's clock says too.
        emit: is told of answers and misses.
        new_holder: makes a name for this process among all that hold tokens.
    """

    def __init__(
        self,
        store: LimitStore,
        *,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        emit: Callable[[QuotaEvent], None],
        new_holder: Callable[[], str],
        timeout_s: float = TIMEOUT_S,
        cool_off_s: float = COOL_OFF_S,
        settle_every_s: float = SETTLE_EVERY_S,
    ) -> None:
        self._store = store
        self._clock = clock
        self._unix_time = unix_time
        self._emit = emit
        self._new_holder = new_holder
        self._timeout_s = timeout_s
        self._cool_off_s = cool_off_s
        self._settle_every_s = settle_every_s
        self._holder = new_holder()
        self._numbers = itertools.count(1)
        self._held = 0
        self._away_until: float | None = None
        self._outbox: deque[Settlement] = deque()
        self._settling = 0
        self._wake = asyncio.Event()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._log = structlog.get_logger("keys")

    @property
    def away(self) -> bool:
        """Whether the last question was not answered."""
        return self._away_until is not None

    def status(self) -> tuple[bool, int]:
        """Whether the store is away, and the settlements that it has not heard of; for metrics."""
        return self.away, len(self._outbox) + self._settling

    async def count(self, key_id: str, limits: KeyLimits) -> QuotaVerdict | None:
        """Count a request; ``None``: the store does not decide now.

        A key that the store has refused is refused here until its next request may pass: requests are never
        given back, so that is certain, and a caller that hammers costs the store nothing.
        """
        known, now = self._known.get(key_id), self._clock()
        if known is not None and known.blocked_until > now:
            limit = limits.requests_per_minute or 0
            excess = Excess(LIMITS[0].name, limit, 1, known.blocked_until - now)
            return QuotaVerdict(excess, known.figures, int(self._unix_time()))
        verdict = await self._take(key_id, limits, QuotaRequest(requests=1))
        if verdict is not None and verdict.excess is not None and verdict.excess.wait_s is not None:
            self._known[key_id].blocked_until = self._clock() + verdict.excess.wait_s
        return verdict

    async def hold(
        self, key_id: str, limits: KeyLimits, tokens: int
    ) -> tuple[QuotaVerdict | None, HoldId | None]:
        """Hold tokens; the id is for :meth:`settle`."""
        if self._cooling_off():
            return None, None
        for _ in range(2):
            hold, holder = HoldId(self._holder, next(self._numbers)), self._holder
            verdict, lapsed = None, False
            try:
                verdict = await self._take(key_id, limits, QuotaRequest(tokens=tokens, hold=hold))
                lapsed = verdict is None and not self.away
            finally:
                if verdict is None and not lapsed:
                    # Cancelled or not answered: it may hold them all the same.
                    self._put(Settlement(key_id, limits, hold, None, 0, sure=False))
            if verdict is not None:
                if verdict.excess is None and holder == self._holder:
                    self._held += 1
                return verdict, hold
            if not lapsed:
                break
            self._rename(holder)
        return None, None

    def last_known(self, key_id: str, ask: QuotaRequest) -> Excess | None:
        """What the store's last answer has against a request that it does not decide on now.

        Nothing when that is older than :data:`LAST_KNOWN_S`: this process' own counts alone can tell then.
        """
        known = self._known.get(key_id)
        if known is None or self._clock() - known.answered_at > LAST_KNOWN_S:
            return None
        # The longest window last, and told first: it keeps the request away for longest.
        for kind, one in reversed(tuple(zip(LIMITS, known.figures, strict=True))):
            asked = ask.tokens if kind.of_tokens else ask.requests
            if one is not None and asked > one.remaining:
                return Excess(kind.name, one.limit, asked, None if asked > one.limit else LOOK_AGAIN_S)
        return None

    def count_passed(self, key_id: str, ask: QuotaRequest) -> None:
        """A request passed without the store."""
        known = self._known.get(key_id)
        if known is not None:
            known.use(ask.requests, ask.tokens)

    async def figures(self, key_id: str, limits: KeyLimits) -> tuple[Figures | None, ...] | None:
        """How the limits stand, as of two seconds ago at most; ``None``: the store does not answer now."""
        if self.away:
            return None
        known, now = self._known.get(key_id), self._clock()
        if known is None or now - known.at > FIGURES_FOR_S:
            if await self._take(key_id, limits, QuotaRequest()) is None:
                return None
            known = self._known[key_id]
        gone = self._clock() - known.at
        return tuple(
            None if one is None else replace(one, reset_s=max(0.0, one.reset_s - gone))
            for one in known.figures
        )

    def settle(
        self,
        key_id: str,
        limits: KeyLimits,
        hold: HoldId | None,
        verdict: QuotaVerdict | None,
        tokens: int,
        used: int,
    ) -> None:
        """What a request used; of one that the store did not decide on (no ``hold``) it hears now."""
        if hold is None and not used:
            return
        at = int(self._unix_time()) if verdict is None else verdict.at
        self._put(Settlement(key_id, limits, hold, at, used))
        if hold is None or hold.holder != self._holder:
            # Nothing is held for it that the figures know of. Of a store that is away they are the last there
            # are, and stay: without what this one leaves free, since who knows what others have used.
            if not self.away:
                self._known.pop(key_id, None)
            return
        self._held -= 1
        known = self._known.get(key_id)
        if known is not None:
            known.use(0, used - tokens)
            known.at = self._clock()

    async def close(self) -> None:
        """Tell the store the rest, if it listens, and let go of it."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._outbox and not self.away:
                    await self._settle_batch()
        except TimeoutError:
            self._lost(len(self._outbox))
        finally:
            await self._store.close()

    async def run(self) -> None:
        """Tell settlements and renew the lease until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._settle_all(), name="limits-settle")
            loops.create_task(self._renew_all(), name="limits-renew")

    async def _take(self, key_id: str, limits: KeyLimits, ask: QuotaRequest) -> QuotaVerdict | None:
        begun = self._clock()
        if self._cooling_off():
            return None
        if self.away:
            # This one tries; the others go on without until it knows.
            self._away_until = begun + self._cool_off_s
        try:
            async with asyncio.timeout(self._timeout_s):
                verdict = await self._store.take(key_id, limits, ask, fresh=not self._held)
        except (TimeoutError, StateUnavailable) as error:
            self._missed(error)
            return None
        self._answered(self._clock() - begun)
        if verdict is not None:
            before = self._known.get(key_id)
            blocked_until = 0.0 if before is None else before.blocked_until
            now = self._clock()
            self._known[key_id] = _Known(verdict.figures, now, now, blocked_until)
            self._known.move_to_end(key_id)
            while len(self._known) > MAX_KEYS:
                self._known.popitem(last=False)
        return verdict

    def _cooling_off(self) -> bool:
        return self._away_until is not None and self._clock() < self._away_until

    def _rename(self, holder: str) -> None:
        """What was held under the old name is forgotten by the store; who comes second finds it done."""
        if self._holder == holder:
            self._log.warning("the hold on keys' tokens has lapsed; it begins anew", held=self._held)
            self._holder, self._held = self._new_holder(), 0

    def _put(self, told: Settlement) -> None:
        if len(self._outbox) >= MAX_OUTBOX:
            self._outbox.popleft()
            self._lost(1)
        self._outbox.append(told)
        self._wake.set()

    async def _settle_all(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._settle_every_s)
            self._wake.clear()
            while self._outbox:
                # A store that was away is asked first whether it is back: what was tried once is told less
                # surely.
                if (self.away and not await self._renewed()) or not await self._settle_batch():
                    await asyncio.sleep(self._cool_off_s)

    async def _settle_batch(self) -> bool:
        batch = [self._outbox.popleft() for _ in range(min(BATCH, len(self._outbox)))]
        done, self._settling = False, len(batch)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._store.settle(batch)
            done = True
        except (TimeoutError, StateUnavailable) as error:
            self._missed(error)
        finally:
            self._settling = 0
            if not done:
                self._outbox.extendleft(replace(one, sure=False) for one in reversed(batch))
        return done

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            if self._held:
                await self._renewed()

    async def _renewed(self) -> bool:
        """Renew the lease; whether the store answered."""
        holder = self._holder
        begun = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                kept = await self._store.renew(holder)
        except (TimeoutError, StateUnavailable) as error:
            self._missed(error)
            return False
        self._answered(self._clock() - begun)
        if not kept and self._held:
            self._rename(holder)
        return True

    def _missed(self, error: Exception) -> None:
        reason = "timeout" if isinstance(error, TimeoutError) else "unavailable"
        self._emit(LimitStoreMissed(reason))
        if not self.away:
            shown = (
                error.reason if isinstance(error, StateUnavailable) else f"no answer in {self._timeout_s:g} s"
            )
            self._log.error(
                "keys' limits are counted by this process alone: their store is away", reason=shown
            )
        self._away_until = self._clock() + self._cool_off_s

    def _answered(self, took_s: float) -> None:
        self._emit(LimitStoreAnswered(took_s))
        if self.away:
            self._log.warning("keys' limits are shared again", settlements_waiting=len(self._outbox))
        self._away_until = None

    def _lost(self, count: int) -> None:
        if count:
            self._emit(SettlementsLost(count))
