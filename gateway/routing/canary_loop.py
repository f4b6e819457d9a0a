"""Drives the canary for all processes, in the process that holds the lease.

The canary's state is a record of the stream ``canary``, appended by compare-and-set: of two processes that
act at the same time, one gets a conflict and changes nothing. The lease in the record only saves work. The
wanted routing is recorded before the routing is changed, so if a process ends in between, the next one
completes the change.

The processes' counts are records of ``canary-samples``. The state contains the number of the last record
read, so each record counts once, whichever process drives; records that were read are deleted. Only the last
state is needed: older ones are deleted a hundred at a time, and all of them when the canary has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import orjson
import structlog

from gateway.errors import BackendUnavailable, InvalidRequest, UnknownRoute
from gateway.routing.canary import CanaryState, Phase, end, in_force, judge, weights_at
from gateway.routing.canary_records import SAMPLES, STREAM, CanaryLease, lease_of, sample_data, windows_of
from gateway.routing.canary_tally import CanaryTally
from gateway.routing.change import same_weights, weights_of, with_weights
from gateway.routing.projection import ELSEWHERE_S, RoutingProjection
from gateway.routing.records import CANARY, CanaryShare, Draft, Stored
from gateway.routing.revision import RoutingFileError
from gateway.state.audit import Audit
from gateway.state.errors import Conflict, StateError
from gateway.state.port import MAX_READ, Record, StateStore
from gateway.state.projection import FollowedStream

AUTHOR = "canary"
LEASE_WINDOWS = 3.0  # number of windows without a record of the driver after which another process takes over
IDLE_S = 1.0  # how often a process without a canary checks for one
MAX_TRIES = 5
"""Attempts to write an operator's command; the driver, which writes at each window, may be first."""
FORGET_EVERY = 100
"""How many read samples or old states are deleted at a time; each deletion is one more write."""
STEPS_AT_ONCE = 4
"""Actions of one tick: a verdict and its routing change, each with one conflict; the rest waits a window."""


class _Overridden(Exception):
    """The route's weights are neither those that the canary set nor those that it wants."""


class _AlreadyApplied(Exception):
    """The route's weights are those that the canary wants."""


@dataclass(eq=False)
class CanaryDriver(FollowedStream):
    """Counts requests, evaluates them and changes the routing; several processes may run one each.

    Args:
        audit: records each change and its reason.
        me: the unique name of this process.
    """

    store: StateStore
    routing: RoutingProjection
    audit: Audit
    tally: CanaryTally
    me: str
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._log = structlog.get_logger("canary")
        self._forgotten = {SAMPLES: 0, STREAM: 0}
        self.head = 0
        self.lease: CanaryLease | None = None

    @property
    def state(self) -> CanaryState | None:
        """The state of the last canary; ``None`` if there was none."""
        return None if self.lease is None else self.lease.state

    def take(self, record: Record) -> None:
        """Apply a record; raises nothing."""
        if record.number <= self.head:
            return
        self.head = record.number
        try:
            self.lease = lease_of(record)
        except ValueError:
            # A newer version wrote the record; processes of that version drive the canary.
            self.lease = None
            self._log.error("a canary's record is not understood here", number=record.number)
        state = self.state
        running = state is not None and state.phase is Phase.RUNNING
        self.tally.watch(state.plan if state is not None and running else None)

    async def change(self, make: Callable[[CanaryState | None], Awaitable[CanaryState]]) -> None:
        """Append the state that ``make`` returns for the last one; repeat it if another process was first.

        Raises Conflict after too many attempts, StateUnavailable, and what ``make`` raises.
        """
        for left in reversed(range(MAX_TRIES)):
            head = self.head
            try:
                await self.put(await make(self.state), head)
                return
            except Conflict:
                if not left or not await self.caught_up_to(head + 1, ELSEWHERE_S):
                    raise

    async def put(self, state: CanaryState, head: int) -> None:
        """Append the state that follows record ``head``, and take the lease.

        Raises Conflict, StateUnavailable.
        """
        until = self.unix_time() + LEASE_WINDOWS * state.plan.window_s
        data = orjson.dumps(CanaryLease(state, self.me, until))
        self.take(await self.followed.append(data, author=AUTHOR, expected=head))
        await self._forget(state)

    async def publish_counts(self) -> None:
        """Append the counts of finished windows for the driver; counts that cannot be written are lost.

        A record that may have been written is not written again, so that nothing counts twice.
        """
        state = self.state
        if state is None:
            return
        for window, counts in self.tally.take():
            try:
                data = sample_data(state.plan.id, window, counts)
                await self.store.append(SAMPLES, data, author=self.me)
            except StateError as error:
                self._log.warning("a window's counts are lost to the canary", reason=error.code)

    async def tick(self) -> None:
        """Evaluate and act, if this process drives. A failed action is tried again at the next window."""
        for _ in range(STEPS_AT_ONCE):
            lease, head = self.lease, self.head
            if lease is None or not lease.state.needs_driver:
                return
            # The holder's clock may be ahead; a lease of more than two is of a clock that was set back.
            longest = 2 * LEASE_WINDOWS * lease.state.plan.window_s
            if lease.holder != self.me and 0 < lease.until - self.unix_time() <= longest:
                return
            try:
                if not lease.state.applied:
                    await self._place(lease.state, head)
                elif not await self._judge(lease, head):
                    return
            except (Conflict, BackendUnavailable) as error:
                # Another process was first; this one will receive its record.
                self._log.info("the canary waits", reason=type(error).__name__)
                return
            except StateError as error:
                self._log.warning("the canary waits for the state store", reason=error.code)
                return

    async def run(self) -> None:
        """Publish counts and evaluate the canary at the end of each window, until cancelled."""
        while True:
            state = self.state
            if state is None or not state.needs_driver:
                await asyncio.sleep(IDLE_S)
                continue
            window_s = state.plan.window_s
            await asyncio.sleep(window_s - self.unix_time() % window_s)
            await self.publish_counts()
            # Wait for the other processes' counts of this window.
            await asyncio.sleep(window_s / 4)
            await self.tick()

    async def _judge(self, lease: CanaryLease, head: int) -> bool:
        """Evaluate new windows and append the state; return whether the routing must be changed now."""
        state, now = lease.state, self.unix_time()
        if self.routing.head < state.revision:
            # The canary's own change of the routing is not applied here yet.
            return False
        if self._override(state):
            await self._overridden(state, head)
            return False
        if state.phase is Phase.PAUSED:
            return False
        records = await self.store.read(SAMPLES, after=state.read_to, limit=MAX_READ)
        read_to = records[-1].number if records else state.read_to
        windows = windows_of(records, state.plan.id)
        # Takes milliseconds for thousands of requests in a window, so it does not run on the event loop.
        judged = await asyncio.to_thread(judge, state, windows, read_to=read_to, now=now)
        spare = lease.until - now > LEASE_WINDOWS * state.plan.window_s / 2
        if judged != state or lease.holder != self.me or not spare:
            await self.put(judged, head)
        return not judged.applied

    async def _forget(self, state: CanaryState) -> None:
        """Delete the samples that the last state has counted, and the states before it."""
        over = state.ended and state.applied
        for stream, up_to in ((SAMPLES, state.read_to), (STREAM, self.head - 1)):
            if up_to - self._forgotten[stream] < (1 if over else FORGET_EVERY):
                continue
            try:
                await self.store.forget(stream, up_to)
            except StateError as error:
                # The state is written; these records are deleted with the next ones.
                self._log.info("a canary's records are not forgotten yet", stream=stream, reason=error.code)
                return
            self._forgotten[stream] = up_to

    async def _place(self, state: CanaryState, head: int) -> None:
        plan, wanted = state.plan, state.wanted
        comment = _comment(state)

        def decide(last: Stored) -> Draft:
            found = weights_of(last.draft.config, plan.route)
            if same_weights(found, wanted):
                raise _AlreadyApplied
            # A step may be in the routing already though that is not recorded, when an abort comes.
            step = weights_at(plan, plan.steps[state.step])
            if not same_weights(found, state.placed) and not same_weights(found, step):
                raise _Overridden
            share = CanaryShare(plan.route, plan.before) if not state.ended else None
            return Draft(with_weights(last.draft.config, plan.route, wanted), comment, CANARY, share)

        try:
            _, stored = await self.routing.change(decide, author=AUTHOR)
            revision = stored.number
        except _AlreadyApplied:
            revision = self.routing.head
        except _Overridden:
            await self._overridden(state, head)
            return
        except (UnknownRoute, InvalidRequest, RoutingFileError) as error:
            await self._overridden(state, head, str(error)[:1_000])
            return
        await self.put(in_force(state, self.unix_time(), revision), head)
        await self.audit.record(
            AUTHOR,
            f"canary.{_action(state)}",
            f"{plan.route}: {plan.backend}",
            comment=comment,
            result=f"revision {revision}",
        )

    async def _overridden(
        self, state: CanaryState, head: int, why: str = "the route was changed by somebody else"
    ) -> None:
        reason = f"{why}; its weights were left as they are"
        if state.ended:
            reason = f"{state.reason}; {reason}"
        found = replace(state, placed=self._found(state))
        await self.put(end(found, Phase.OVERRIDDEN, reason, self.unix_time()), head)
        target = f"{state.plan.route}: {state.plan.backend}"
        await self.audit.record(AUTHOR, "canary.overridden", target, comment=reason)

    def _override(self, state: CanaryState) -> bool:
        return not same_weights(self._found(state), state.wanted)

    def _found(self, state: CanaryState) -> Mapping[str, float]:
        """The weights that the route has now; none if it is gone."""
        try:
            return weights_of(self.routing.last().draft.config, state.plan.route)
        except UnknownRoute:
            return {}


def _action(state: CanaryState) -> str:
    return {Phase.ROLLED_BACK: "rollback", Phase.ABORTED: "abort", Phase.DONE: "done"}.get(
        state.phase, "step"
    )


def _comment(state: CanaryState) -> str:
    plan = state.plan
    if state.phase in (Phase.ROLLED_BACK, Phase.ABORTED):
        word = "rolled back" if state.phase is Phase.ROLLED_BACK else "aborted"
        return f"canary {plan.id} of {plan.backend} {word}: {state.reason}"[:1_000]
    return f"canary {plan.id}: {plan.backend} at {plan.steps[state.step]:g} %"
