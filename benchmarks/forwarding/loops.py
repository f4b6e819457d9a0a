"""The two loops of the load generator.

A closed loop keeps a number of requests in flight. An open loop sends at times that the seed sets (Poisson),
whether or not earlier requests were answered, and measures latency from the time at which a request was due,
so that a slow gateway cannot slow its load down.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.forwarding.client import Answer, Connection
from benchmarks.forwarding.ticker import Ticker
from benchmarks.forwarding.workload import ANSWER_TOKENS, MODEL, Regime, answer_text, bodies

# An open loop with this many in flight is overloaded; further requests that are due count as dropped.
MOST_IN_FLIGHT = 256
# Below the 5 s after which uvicorn closes an idle connection, so that none is used that is being closed.
MOST_IDLE_S = 2.0
REOPEN_S = 0.01
FAULTS_SHOWN = 3
FAULT_CHARACTERS = 160


class Shape(StrEnum):
    """What decides when the next request is sent."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Job:
    """One load on one gateway.

    Attributes:
        amount: requests in flight for a closed loop, requests a second for an open one.
        seconds: length of the measured time, after ``warm_up_s``.
        stagger_s: a closed loop starts its requests spread over this time.
        pid: the gateway's first process; the CPU of its process tree is measured; ``None`` for no gateway.
    """

    port: int
    shape: Shape
    amount: int
    seconds: float
    key: str
    seed: str
    warm_up_s: float = 2.0
    regime: Regime = Regime.CONVERSATION
    stream: bool = False
    stagger_s: float = 0.0
    pid: int | None = None
    path: str = "/v1/chat/completions"
    model: str = MODEL


@dataclass(slots=True)
class Result:
    """The figures of the measured time.

    Attributes:
        answers: correct ones that ended in it (closed loop), or whose request was due in it (open loop).
        elapsed_s: its length.
        cpu_s: CPU of the gateway's process tree in it.
        own_cpu_s: CPU of the load generator in it.
        rss_bytes: resident memory of the tree at the end.
        latencies_ms: of ``answers``, from due to the end; ``first_ms`` to a stream's first text.
        marks: events of streams that arrived in it, including the few without text.
        whole: correct answers, whenever they ended; ``whole_events`` their events with text, ``whole_marks``
            all of them.
        failed: answers with a fault, and requests without an answer.
        dropped: requests due while :data:`MOST_IN_FLIGHT` were in flight.
        faults: the first few.
    """

    answers: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    own_cpu_s: float = 0.0
    rss_bytes: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    marks: int = 0
    whole: int = 0
    whole_events: int = 0
    whole_marks: int = 0
    failed: int = 0
    dropped: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """Return the tokens streamed in the measured time, including those of unfinished answers."""
        return self.marks * ANSWER_TOKENS * self.whole / self.whole_marks if self.whole_marks else 0.0

    def add(self, answer: Answer, due_at: float, *, counted: bool) -> None:
        """Count a correct answer; record its times only if it belongs to the measured time."""
        self.whole += 1
        self.whole_events += answer.events
        self.whole_marks += answer.marks
        if counted:
            self.answers += 1
            self.latencies_ms.append((answer.done_at - due_at) * 1e3)
            if answer.first_at is not None:
                self.first_ms.append((answer.first_at - due_at) * 1e3)

    def fault(self, text: str) -> None:
        """Count a failure."""
        self.failed += 1
        if len(self.faults) < FAULTS_SHOWN:
            self.faults.append(text[:FAULT_CHARACTERS])


class Caller:
    """Sends the job's requests over its connections, and checks and records the answers.

    Args:
        free: called with a connection whose answer has ended.
        by_due: count answers whose request was due in the measured time; else those that ended in it.
    """

    def __init__(self, job: Job, result: Result, *, free: Callable[[Connection], None], by_due: bool) -> None:
        self.counting = False
        self._job = job
        self._result = result
        self._free = free
        self._by_due = by_due
        self._sent: dict[Connection, tuple[float, str, bool]] = {}
        self._one_ended = asyncio.Event()
        self._bodies = bodies(job.regime, stream=job.stream, seed=job.seed, model=job.model)
        self._head = (
            f"POST {job.path} HTTP/1.1\r\nhost: 127.0.0.1:{job.port}\r\naccept: */*\r\n"
            f"authorization: Bearer {job.key}\r\ncontent-type: application/json\r\ncontent-length: "
        ).encode()

    @property
    def in_flight(self) -> int:
        """Return the number of requests whose answers have not ended."""
        return len(self._sent)

    async def connect(self) -> Connection:
        """Open a connection."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._ended, self._seen), "127.0.0.1", self._job.port
        )
        return connection

    def send(self, connection: Connection, due_at: float) -> None:
        """Send the next request."""
        body, ticket = next(self._bodies)
        self._sent[connection] = (due_at, ticket, self.counting)
        connection.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), stream=self._job.stream)

    async def drain(self, patience_s: float) -> None:
        """Wait for the answers in flight; those that are not complete in time have failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._sent:
                    self._one_ended.clear()
                    await self._one_ended.wait()
        for connection in list(self._sent):
            self._result.fault("no answer in time")
            connection.close()
        self._sent.clear()

    def _seen(self, marks: int) -> None:
        if self.counting:
            self._result.marks += marks

    def _ended(self, connection: Connection, answer: Answer) -> None:
        due_at, ticket, was_due = self._sent.pop(connection)
        if answer.text != answer_text(ticket):
            self._result.fault(answer.fault or f"wrong text: {(answer.text or '')[:80]!r}…")
        else:
            self._result.add(answer, due_at, counted=was_due if self._by_due else self.counting)
        self._one_ended.set()
        self._free(connection)


class ClosedLoop:
    """Keeps ``job.amount`` requests in flight."""

    def __init__(self, job: Job, result: Result, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._stopped = False
        self.caller = Caller(job, result, free=self._free, by_due=False)
        for number in range(job.amount):
            tasks.create_task(self._open(job.stagger_s * number / job.amount))

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True

    async def _open(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self.caller.send(await self.caller.connect(), time.perf_counter())

    def _free(self, connection: Connection) -> None:
        if self._stopped:
            connection.close()
        elif connection.open:
            self.caller.send(connection, time.perf_counter())
        else:
            # Without the pause, a gateway that refuses every connection would be asked in a tight loop.
            self._tasks.create_task(self._open(REOPEN_S))


class OpenLoop:
    """Sends ``job.amount`` requests a second on average, at times that the seed sets."""

    def __init__(self, job: Job, result: Result, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._result = result
        self._rate = job.amount
        self._gaps = random.Random(job.seed)
        self._idle: list[tuple[float, Connection]] = []
        self.caller = Caller(job, result, free=self._free, by_due=True)
        self._due_at = time.perf_counter()
        self._ticker = Ticker(asyncio.get_running_loop(), self._due)
        self._ticker.at(self._due_at)

    def stop(self) -> None:
        """Send nothing more."""
        self._ticker.close()

    def _due(self) -> None:
        due_at = self._due_at
        self._due_at += self._gaps.expovariate(self._rate)
        self._ticker.at(self._due_at)
        if self.caller.in_flight >= MOST_IN_FLIGHT:
            self._result.dropped += self.caller.counting
            return
        connection = self._take()
        if connection is not None:
            self.caller.send(connection, due_at)
        else:
            self._tasks.create_task(self._open(due_at))

    async def _open(self, due_at: float) -> None:
        self.caller.send(await self.caller.connect(), due_at)

    def _take(self) -> Connection | None:
        """Return the connection that was used last, so that the others become stale and are closed."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.open and time.perf_counter() - since < MOST_IDLE_S:
                return connection
            connection.close()
        return None

    def _free(self, connection: Connection) -> None:
        if connection.open:
            self._idle.append((time.perf_counter(), connection))
