"""Keys' limits shared by all gateway processes: the store decides, within a time limit.

If the store is slow or unreachable, :class:`gateway.keys.rate_limits.KeyLimiter` decides by the store's last
answer, while that is fresh, and by this process's own counts (fail open). The store is tried again later, and
then receives what requests used meanwhile.
"""

import asyncio
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import structlog

from accounting.events import LimitStoreAnswered, LimitStoreMissed, QuotaEvent, SettlementsLost
from accounting.keys import MAX_KEYS, Budget, KeyLimits
from accounting.quotas import (
    LIMITS,
    RETRY_HELD_S,
    Excess,
    Figures,
    HoldId,
    QuotaRequest,
    QuotaVerdict,
    Settlement,
    kinds_of,
)
from gateway.state.errors import StateUnavailable
from gateway.state.limits import LEASE_S, LimitStore
from resilience.time_limits import LATE_S, OnTime, TimeLimit, TimeLimits

# Longest wait of a request for the store's decision, in seconds. Redis answers in far less than 1 ms.
TIMEOUT_S = 0.5
# The most seconds by which that wait is extended while the request waits for this process: its event loop is
# late, or the store answers its other requests. 1,000 requests of a key at once take a second.
MAX_LATE_S = 5.0
# Seconds without a call after the store did not answer: a hanging store delays one request per second.
COOL_OFF_S = 1.0
RENEW_EVERY_S = LEASE_S / 5
MAX_OUTBOX = 10_000  # the most settlements that wait for the store: one minute at 160 requests per second
# Settlements per call, and the seconds between calls, during which unused tokens stay reserved.
BATCH = 100
SETTLE_EVERY_S = 0.02
# Longest wait for the last settlements when the gateway stops, in seconds: a store that restarts in less
# gets them all.
CLOSE_TIMEOUT_S = 5.0
FIGURES_FOR_S = 2.0  # seconds for which the figures of a key are reused for other requests of this process
# Seconds for which the last answer is used while the store does not answer: longer than a timeout, the
# cool-off and another timeout, as with a busy SQLite. Unlike own counts, it includes other processes' use.
LAST_KNOWN_S = 5.0


@dataclass(slots=True)
class _Known:
    """The last known figures of a key's ``limits``; no request passes before ``blocked_until``.

    ``answered_at`` is the time of the store's answer, ``at`` that of this process's last change.
    """

    limits: KeyLimits | Budget
    figures: tuple[Figures | None, ...]
    at: float
    answered_at: float
    blocked_until: float = 0.0

    def use(self, requests: int, tokens: int) -> None:
        """Subtract use that was not sent to the store yet; negative numbers add to the remaining ones."""
        self.figures = tuple(
            None
            if one is None
            else replace(
                one,
                remaining=max(0, min(one.limit, one.remaining - (tokens if kind.of_tokens else requests))),
            )
            for kind, one in zip(kinds_of(self.limits), self.figures, strict=True)
        )


@dataclass(eq=False)
class SharedLimits:
    """Asks the store for decisions. Lives on the event loop.

    Args:
        unix_time: seconds since 1970, assumed equal to the store's clock.
        new_holder: makes a unique name under which this process holds tokens.
    """

    store: LimitStore
    _: KW_ONLY
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    emit: Callable[[QuotaEvent], None]
    new_holder: Callable[[], str]
    timeout_s: float = TIMEOUT_S
    cool_off_s: float = COOL_OFF_S
    settle_every_s: float = SETTLE_EVERY_S
    close_timeout_s: float = CLOSE_TIMEOUT_S

    def __post_init__(self) -> None:
        self._holder = self._sender = self.new_holder()
        self._numbers = itertools.count(1)
        self._held = 0
        self._away_until: float | None = None
        self._outbox: deque[Settlement] = deque()
        self._batch: list[Settlement] = []
        self._batch_number = 0
        self._wake = asyncio.Event()
        self._time_limits = TimeLimits()
        self._answered_at = -math.inf  # when the store last answered, by the event loop's clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._log = structlog.get_logger("keys")

    @property
    def away(self) -> bool:
        """Whether the last request to the store was not answered."""
        return self._away_until is not None

    def status(self) -> tuple[bool, int]:
        """Return, for metrics, whether the store is unreachable, and how many settlements wait for it."""
        return self.away, len(self._outbox) + len(self._batch)

    async def count(self, key_id: str, limits: KeyLimits) -> QuotaVerdict | None:
        """Count a request; ``None`` if the store does not answer.

        A key that the store has refused is refused here until its next request may pass. A counted request is
        never returned to the limit, so this is exact, and repeated requests cost the store nothing.
        """
        known, now = self._known_of(key_id, limits), self.clock()
        if known is not None and known.blocked_until > now:
            limit = limits.requests_per_minute or 0
            excess = Excess(LIMITS[0].name, limit, 1, known.blocked_until - now)
            return QuotaVerdict(excess, known.figures, int(self.unix_time()))
        verdict = await self._take(key_id, limits, QuotaRequest(requests=1))
        if verdict is not None and verdict.excess is not None and verdict.excess.wait_s is not None:
            self._known[key_id].blocked_until = self.clock() + verdict.excess.wait_s
        return verdict

    async def hold(
        self, key_id: str, limits: KeyLimits | Budget, tokens: int
    ) -> tuple[QuotaVerdict | None, HoldId | None]:
        """Hold tokens; return the verdict and the id for :meth:`settle`."""
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
                    # Cancelled or not answered: the store may hold the tokens.
                    self._put(Settlement(key_id, limits, hold, None, 0))
            if verdict is not None:
                if tokens and verdict.excess is None and holder == self._holder:
                    self._held += 1  # a hold of nothing has no lease
                return verdict, hold
            if not lapsed:
                break
            self._rename(holder)
        return None, None

    def last_known(self, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest) -> Excess | None:
        """Return the limit that a request exceeds by the store's last answer, if any.

        An answer older than :data:`LAST_KNOWN_S`, or about other limits, is not used.
        """
        known = self._known_of(key_id, limits)
        if known is None or self.clock() - known.answered_at > LAST_KNOWN_S:
            return None
        # The longest window is the last one; it is checked first because it blocks the longest.
        for kind, one in reversed(tuple(zip(kinds_of(limits), known.figures, strict=True))):
            asked = ask.tokens if kind.of_tokens else ask.requests
            if one is not None and asked > one.remaining:
                return Excess(kind.name, one.limit, asked, None if asked > one.limit else RETRY_HELD_S)
        return None

    def count_passed(self, key_id: str, ask: QuotaRequest) -> None:
        known = self._known.get(key_id)
        if known is not None:
            known.use(ask.requests, ask.tokens)

    async def figures(self, key_id: str, limits: KeyLimits | Budget) -> tuple[Figures | None, ...] | None:
        """Return the limits' figures, at most two seconds old; ``None`` if the store does not answer."""
        if self.away:
            return None
        known, now = self._known_of(key_id, limits), self.clock()
        if known is None or now - known.at > FIGURES_FOR_S:
            if await self._take(key_id, limits, QuotaRequest()) is None:
                return None
            known = self._known[key_id]
        gone = self.clock() - known.at
        return tuple(
            None if one is None else replace(one, reset_s=max(0.0, one.reset_s - gone))
            for one in known.figures
        )

    def settle(
        self,
        key_id: str,
        limits: KeyLimits | Budget,
        hold: HoldId | None,
        verdict: QuotaVerdict | None,
        tokens: int,
        used: int,
    ) -> None:
        """Send what a request used; ``hold`` is ``None`` if the store did not decide on the request."""
        if hold is None and not used:
            return
        at = int(self.unix_time()) if verdict is None else verdict.at
        self._put(Settlement(key_id, limits, hold, at, used))
        if hold is None or hold.holder != self._holder:
            # The figures do not include this request's tokens, so they are dropped. The last figures of an
            # unreachable store stay unchanged: other processes may have used what this request left.
            if not self.away:
                self._known.pop(key_id, None)
            return
        self._held -= bool(tokens)
        known = self._known.get(key_id)
        if known is not None:
            known.use(0, used - tokens)
            known.at = self.clock()

    async def close(self) -> None:
        """Send the remaining settlements, for a while also if the store does not answer, and close it."""
        try:
            async with asyncio.timeout(self.close_timeout_s):
                while self._batch or self._outbox:
                    if not await self._settle_batch():
                        await asyncio.sleep(self.settle_every_s)
        except TimeoutError:
            left = len(self._batch) + len(self._outbox)
            self._log.error(
                "keys' limits: their store did not get the last settlements", settlements_lost=left
            )
            self._lost(left)
        finally:
            await self.store.close()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._settle_all(), name="limits-settle")
            loops.create_task(self._renew_all(), name="limits-renew")

    async def _take(self, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest) -> QuotaVerdict | None:
        begun = self.clock()
        if self._cooling_off():
            return None
        if self.away:
            # This request tries the store; others decide without it until there is an answer.
            self._away_until = begun + self.cool_off_s
        try:
            with self._in_time():
                verdict = await self.store.take(key_id, limits, ask, fresh=not self._held)
        except (TimeoutError, StateUnavailable) as error:
            self._missed(error)
            return None
        self._answered(self.clock() - begun)
        if verdict is not None:
            before = self._known_of(key_id, limits)
            blocked_until = 0.0 if before is None else before.blocked_until
            now = self.clock()
            self._known[key_id] = _Known(limits, verdict.figures, now, now, blocked_until)
            self._known.move_to_end(key_id)
            while len(self._known) > MAX_KEYS:
                self._known.popitem(last=False)
        return verdict

    def _in_time(self) -> TimeLimit:
        """The limit of one call; waits for a connection, and for the event loop, are not the store's."""
        on_time = OnTime(self.timeout_s, self.timeout_s + MAX_LATE_S, self._is_answering)
        return TimeLimit(self._time_limits, on_time.step_s, on_time)

    def _is_answering(self) -> bool:
        return asyncio.get_running_loop().time() - self._answered_at < LATE_S

    def _known_of(self, key_id: str, limits: KeyLimits | Budget) -> _Known | None:
        """What is known of a key, unless its limits have changed since."""
        known = self._known.get(key_id)
        return known if known is not None and known.limits == limits else None

    def _cooling_off(self) -> bool:
        return self._away_until is not None and self.clock() < self._away_until

    def _rename(self, holder: str) -> None:
        """Take a new name, as the store has dropped the old one's tokens. A second call changes nothing."""
        if self._holder == holder:
            self._log.warning("the store dropped the tokens held for keys", held=self._held)
            self._holder, self._held = self.new_holder(), 0

    def _put(self, settlement: Settlement) -> None:
        if len(self._outbox) >= MAX_OUTBOX:
            self._outbox.popleft()
            self._lost(1)
        self._outbox.append(settlement)
        self._wake.set()

    async def _settle_all(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self.settle_every_s)
            self._wake.clear()
            while self._batch or self._outbox:
                if (self.away and not await self._renewed()) or not await self._settle_batch():
                    await asyncio.sleep(self.cool_off_s)

    async def _settle_batch(self) -> bool:
        """Send a batch, the same one until it is answered; return whether the store answered."""
        if not self._batch:
            self._batch = [self._outbox.popleft() for _ in range(min(BATCH, len(self._outbox)))]
            self._batch_number += 1
        try:
            with self._in_time():
                await self.store.settle(self._sender, self._batch_number, self._batch)
        except (TimeoutError, StateUnavailable) as error:
            self._missed(error)
            return False
        self._batch = []
        return True

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            if self._held or self.away:
                await self._renewed()

    async def _renewed(self) -> bool:
        """Renew the lease; return whether the store answered."""
        holder = self._holder
        begun = self.clock()
        try:
            with self._in_time():
                renewed = await self.store.renew(holder)
        except (TimeoutError, StateUnavailable) as error:
            self._missed(error)
            return False
        self._answered(self.clock() - begun)
        if not renewed and self._held:
            self._rename(holder)
        return True

    def _missed(self, error: Exception) -> None:
        reason = "timeout" if isinstance(error, TimeoutError) else "unavailable"
        self.emit(LimitStoreMissed(reason))
        if not self.away:
            shown = (
                error.reason if isinstance(error, StateUnavailable) else f"no answer in {self.timeout_s:g} s"
            )
            self._log.error(
                "keys' limits are counted by this process alone: their store is unreachable", reason=shown
            )
        self._away_until = self.clock() + self.cool_off_s

    def _answered(self, took_s: float) -> None:
        self.emit(LimitStoreAnswered(took_s))
        self._answered_at = asyncio.get_running_loop().time()
        if self.away:
            self._log.warning("keys' limits are shared again", settlements_waiting=len(self._outbox))
        self._away_until = None

    def _lost(self, count: int) -> None:
        if count:
            self.emit(SettlementsLost(count))
