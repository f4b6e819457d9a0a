"""Background responses, which continue when their caller disconnects."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import structlog
from msgspec import structs

from accounting.errors import LedgerUnavailable
from accounting.leases import LeaseEnds
from accounting.stored_responses import CANCELLED, StoredResponse
from budgeting.values import Plan
from gateway.contracts.answer import Answer
from gateway.contracts.events import Delta
from gateway.contracts.responses.answer import failed_response
from gateway.contracts.responses.request import ResponsesRequest
from gateway.contracts.responses.stream import ResponseFrames
from gateway.errors import Draining, Internal, NotFound, PublicError, RateLimited, public_error
from gateway.generation.sink import Sink
from gateway.requests.stored_responses import RETRY_MS, StoredResponses, response_of

LOOK_S: Final = 2.0  # seconds between two heartbeats of the responses that run here
LEASE_S: Final = 15.0  # seconds without a heartbeat after which a response's gateway is considered dead
SWEEP_S: Final = 60.0  # seconds between two deletions of expired responses
ABANDONED: Final = 100  # most abandoned responses that are read at a time

CANCEL_S: Final = 10.0  # longest wait for a cancelled response to end, in seconds

_GONE: Final = public_error(Internal("the gateway that ran the response has ended"))
_NUMBER: Final = re.compile(rb'"sequence_number":(\d+)')


class BackgroundRun:
    """One response while it runs here: a sink that stores its events, at most ``responses.max_bytes``."""

    def __init__(self, asked: ResponsesRequest, stored: StoredResponses) -> None:
        self.asked = asked
        self.frames = ResponseFrames(asked, asked.request.model or "")
        self.task: asyncio.Task[None] | None = None
        self.accepted = asyncio.Event()
        """Set when the request waits for its backend, and at its end."""
        self.refusal: PublicError | None = None
        """Why the request was not accepted; nothing of it is stored then."""
        self.ended = self._ending = False
        self.reruns = False
        """Whether another gateway may run the response again if this one stops."""
        self.events: list[bytes] = []
        self.queued = self.state()
        self.alive_until = stored.now() + LEASE_S
        self.lost = False
        """Whether another gateway has run the response again, or ended it."""
        self.unsaved: StoredResponse | None = None
        """The ended response, if the database could not be reached to store it."""
        self.held = ExitStack()
        self._stored = stored
        self._room = stored.section.max_bytes
        self._log = structlog.get_logger("gateway.responses")
        self._news = asyncio.Event()

    @property
    def row(self) -> StoredResponse:
        """What changes while it runs; its input does not, and may take long to pack."""
        return self._stored.packed(structs.replace(self.asked, items=()), self.state())

    def state(self) -> dict[str, Any]:
        return self.frames.state("in_progress" if self.events else "queued")

    @property
    def discarded(self) -> bool:
        """Whether another gateway makes the answer: it has taken the response, or will as this one stops."""
        return self.lost or (self.reruns and self.task is not None and bool(self.task.cancelling()))

    def planned(self, plan: Plan, model: str) -> None:
        if not self.events:
            self.frames = ResponseFrames(self.asked, model)

    async def delta(self, delta: Delta) -> None:
        if self._stored.now() > self.alive_until:  # this process may have been stopped meanwhile
            with suppress(LedgerUnavailable):
                await self.keep_alive()
            await asyncio.sleep(0)
        if delta.__class__ is not Delta:
            self._add(self.frames.event(delta))
        elif delta.text or delta.logprobs:
            self._add(self.frames.delta(delta))

    async def finish(self, answer: Answer) -> None:
        """Store the response, then add its last event."""
        response = self.frames.ending(answer)
        await self._end(response, self.frames.finish(answer))

    async def fail(self, error: PublicError) -> None:
        """Store the failure, then add its event; cut by the end of a drain, leave it to another gateway.

        A request that was not accepted is deleted: its caller gets the error.
        """
        if not self.accepted.is_set():
            self.refusal = error
            with suppress(LedgerUnavailable):  # else it fails again when it is run again
                await self._stored.store.delete(self.asked.request.caller.tenant, self.queued["id"])
        if self.refusal is not None or (error.code == Draining.code and self.reruns):
            self.abandon(error)
            return
        last = self.frames.fail(error, "")
        why = failed_response(self.asked, error, "", ())["error"]
        await self._end(self.frames.state("failed", error=why), last)

    async def keep_alive(self) -> None:
        """Extend the lease, or cancel a run whose response has ended elsewhere. Raises LedgerUnavailable."""
        row, now = await asyncio.to_thread(lambda: self.row), self._stored.now()
        try:
            if await self._stored.store.keep_alive(row, now + LEASE_S) or self._ending:
                return
            found = await self._stored.store.get(row.tenant, row.response_id, now)
            self.lost = found is not None and found.status != CANCELLED
            self.cancel()
        finally:
            self.alive_until = now + LEASE_S

    def cancel(self) -> None:
        """Cancel the run, once: a second cancellation would interrupt the storing of its end."""
        if self.task is not None and not self.task.cancelling():
            self.reruns = False
            self.task.cancel()

    async def cancelled(self) -> None:
        """Store the partial response as cancelled, unless it has ended, then add its last event."""
        if not self.ended:
            response = self.frames.state(CANCELLED)
            last = self.frames.stop(response)  # also closes the open item and adds it to the response
            await self._end(response, last)

    def abandon(self, error: PublicError) -> None:
        """End the stream because this gateway stops; another gateway ends the stored response."""
        if not self.ended:
            self._show_end(self.frames.fail(error, ""))

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events after number ``after``, as they arrive."""
        at = after + 1
        while True:
            news = self._news
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self.ended:
                return
            await news.wait()

    async def _end(self, response: dict[str, Any], last: bytes) -> None:
        self._ending = True
        whole = b"".join((*self.events, self._opened(last)))
        pack = partial(self._stored.packed, self.asked, response, whole)
        row: StoredResponse | None = None
        try:
            try:
                row = await asyncio.to_thread(pack)
                await self._stored.store.finish(row)
            except asyncio.CancelledError:
                row = row or pack()
                await self._stored.store.finish(row)  # else the answer is made, and billed, again
                raise
        except LedgerUnavailable as error:
            self.unsaved = row
            self._log.warning("response not stored", response=response["id"], reason=str(error))
        finally:
            self._show_end(last)

    def _opened(self, data: bytes) -> bytes:
        return data if self.events else self.frames.opening + data

    def _show_end(self, last: bytes) -> None:
        self.events += split(self._opened(last))
        self.ended = True
        self.accepted.set()
        self._wake_readers()

    def _add(self, data: bytes) -> None:
        data = self._opened(data)
        self._room -= len(data)
        if self._room < 0:
            raise RateLimited("the stream of the response is larger than responses.max_bytes")
        self.events += split(data)
        self._wake_readers()

    def _wake_readers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


Run = Callable[[ResponsesRequest, Sink], Awaitable[None]]


class Rerun(Protocol):
    """Runs the responses of dead gateways again."""

    def ready(self) -> bool:
        """Whether this gateway accepts requests."""

    async def asked(self, row: StoredResponse) -> ResponsesRequest:
        """Return the request, with its key's current rights. Raises the errors that refuse a request."""

    async def run(self, asked: ResponsesRequest, sink: Sink) -> None:
        """Run the request to its end."""


@dataclass(eq=False)
class BackgroundResponses:
    """The responses that run in this process, while :meth:`run` runs.

    A response whose gateway died is run again once by another gateway with the same database. If a client has
    received events of its stream, which a new run could not continue, it is ended as failed instead, as all
    are without ``rerun``.
    ``look_s`` is the time between two heartbeats of all responses here, in seconds; ``counted`` gives a block
    that counts as in flight, and raises Draining on entry if the gateway is stopping; ``reporting`` gives one
    that raises nothing, in which a drain waits for the database to take an answer.
    """

    stored: StoredResponses = field(default_factory=StoredResponses)
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    look_s: float = LOOK_S
    counted: Callable[[], AbstractContextManager[None]] = nullcontext
    reporting: Callable[[], AbstractContextManager[None]] = nullcontext
    rerun: Rerun | None = None

    def __post_init__(self) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._leases = LeaseEnds(LEASE_S, self.clock, self.stored.now)
        self._log = structlog.get_logger("gateway.responses")

    def of(self, tenant: str, response_id: str) -> BackgroundRun | None:
        return self._runs.get((tenant, response_id))

    async def show(self, begun: BackgroundRun) -> None:
        """Record that a client receives the response's events from now on. Raises LedgerUnavailable."""
        begun.reruns = False
        await self.stored.store.forbid_rerun(begun.row)

    async def start(self, asked: ResponsesRequest, run: Run) -> BackgroundRun:
        """Store a response as queued, and start it; returns when it is accepted, or has a ``refusal``.

        Raises LedgerUnavailable, RateLimited, Draining.
        """
        if self._tasks is None or self._full:
            raise RateLimited(
                f"{len(self._runs)} responses run in the background, the limit is"
                f" {self.stored.section.max_background}; try again",
                param="background",
                retry_after_ms=RETRY_MS,
            )
        begun = BackgroundRun(asked, self.stored)
        row = await asyncio.to_thread(self.stored.packed, asked, begun.queued)
        row = replace(row, alive_until=self.stored.now() + LEASE_S, again=asked.again)
        with self.counted():
            await self.stored.store.put(row)
            begun.reruns = row.again is not None
            self._begin(self._tasks, begun, row, run)
        await begun.accepted.wait()
        return begun

    @property
    def _full(self) -> bool:
        return len(self._runs) >= self.stored.section.max_background

    def _begin(self, tasks: asyncio.TaskGroup, begun: BackgroundRun, row: StoredResponse, run: Run) -> None:
        key = row.tenant, row.response_id
        self._runs[key] = begun
        begun.task = tasks.create_task(self._run(key, begun, run), name=row.response_id)

    async def cancel(self, row: StoredResponse) -> dict[str, Any]:
        """End a response as cancelled, wherever it runs; return the object, unchanged if it had ended."""
        begun = self.of(row.tenant, row.response_id)
        if begun is not None and begun.task is not None:
            begun.cancel()
            await asyncio.wait({begun.task}, timeout=CANCEL_S)
        else:
            await self.stored.end(row, {**response_of(row), "status": CANCELLED})
            pause_s = self.look_s / 4
            for _ in range(round(CANCEL_S / pause_s)):  # the gateway that runs it notices and stores the rest
                if not (await self.stored.get(row.tenant, row.response_id)).open(self.stored.now()):
                    break
                await asyncio.sleep(pause_s)
        return response_of(await self.stored.get(row.tenant, row.response_id))

    async def run(self) -> None:
        """Run until cancelled; responses that still run are then abandoned, those not stored are lost."""
        if not self.stored.enabled:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._look(tasks)
                finally:
                    self._tasks = None
        finally:
            for _, response_id in self._runs:
                self._log.error("an ended response was never stored; it is billed", response=response_id)
            await self.stored.store.close()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        swept, away, next_at = float("-inf"), False, float("-inf")
        while True:
            try:
                await self._say_alive()
                if self.clock() >= next_at:
                    next_at = self.clock() + await self._take_abandoned(tasks)
                if self.clock() - swept >= SWEEP_S:
                    swept = self.clock()
                    await self.stored.store.sweep(self.stored.now())
                if away:
                    self._log.info("stored responses are back")
                away = False
            except LedgerUnavailable as error:
                self._leases.query_failed()
                if not away:
                    self._log.warning("stored responses unreachable", reason=str(error))
                away = True
            await asyncio.sleep(self.look_s)

    async def _run(self, key: tuple[str, str], begun: BackgroundRun, run: Run) -> None:
        try:
            await run(begun.asked, begun)
        except asyncio.CancelledError:
            if self._tasks is None:
                begun.abandon(_GONE)
            else:
                await begun.cancelled()
            raise
        except Exception as defect:  # it must not end the other responses, and the gateway with them
            self._log.error("response ended", response=key[1], error_type=type(defect).__name__)
            begun.abandon(_GONE)
        finally:
            if begun.unsaved is None:
                del self._runs[key]
            elif key in self._runs:
                begun.held.enter_context(self.reporting())

    async def _say_alive(self) -> None:
        for key, begun in list(self._runs.items()):
            if begun.unsaved is not None:
                await self.stored.store.finish(begun.unsaved)
                del self._runs[key]
                begun.held.close()
            if not begun.ended:
                await begun.keep_alive()

    async def _take_abandoned(self, tasks: asyncio.TaskGroup) -> float:
        """Run abandoned responses again, or end them; returns the seconds in which no other can be abandoned.

        A lease that another gateway gives or extends meanwhile ends after the first one that is known now.
        """
        now, late = self.stored.now(), self._leases.over_before()
        first = await self.stored.store.first_lease_end()
        self._leases.answered(now)
        if first is None or first >= late:
            return LEASE_S if first is None else min(first - late, LEASE_S)
        for row in await self.stored.store.abandoned(late, ABANDONED):
            if not row.again or self.rerun is None:
                await self._fail(row, _GONE)
            elif not self.rerun.ready() or self._full:
                continue  # another gateway may run it, or this one later
            elif await self.stored.store.claim(row, late, now + LEASE_S):
                await self._run_again(tasks, row, self.rerun)
        return 0.0

    async def _run_again(self, tasks: asyncio.TaskGroup, row: StoredResponse, rerun: Rerun) -> None:
        try:
            asked = await rerun.asked(row)
        except Exception as error:
            self._log.warning("not run again", response=row.response_id, reason=type(error).__name__)
            await self._fail(row, public_error(error))
        else:
            self._log.info("run again", response=row.response_id)
            begun = BackgroundRun(asked, self.stored)
            begun.accepted.set()
            self._begin(tasks, begun, row, rerun.run)

    async def _fail(self, row: StoredResponse, error: PublicError) -> None:
        error_body = {"code": "server_error", "message": error.message}
        try:
            response = response_of(row)
        except NotFound:
            # It is damaged. Its body stays as it is, but no gateway looks at the row again.
            await self.stored.store.finish(replace(row, status="failed", alive_until=None, again=None))
        else:
            await self.stored.end(row, {**response, "status": "failed", "error": error_body})


def split(data: bytes) -> list[bytes]:
    return [one + b"\n\n" for one in data.split(b"\n\n") if one]


def number_of(event: bytes) -> int:
    """Return the ``sequence_number`` of an event; -1 without one."""
    found = _NUMBER.search(event)
    return -1 if found is None else int(found[1])
