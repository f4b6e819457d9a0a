"""Spans leave the event loop here: a bounded queue of finished requests, and one thread that sends them.

The thread builds the spans as well, a few requests at a time and with a short sleep in between, so that the
event loop never waits for the interpreter longer than those take.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from observability.attributes import Value
from observability.events import RequestRecord
from observability.trace_build import spans_of
from observability.trace_encode import request
from observability.trace_facts import EdgeRecord, TraceFacts
from observability.trace_sampling import TraceFigures
from observability.trace_transport import Refused, Transport, TryAgain
from observability.tracing import RootSpan

# Finished requests that wait for the collector, some 3 KB each; the oldest go first. Two seconds of 1,000
# requests a second.
MAX_WAITING: Final = 2_048
# Characters of recorded content that wait; beyond, traces go without theirs.
MAX_WAITING_CHARS: Final = 8 << 20
# A batch of some 1,300 spans, 700 KB; collectors take 4 MB in a message.
MAX_BATCH: Final = 128
# The queue is looked at this often: a thread that wakes for each request takes the interpreter as often.
DELAY_S: Final = 0.2
# Requests whose spans are built in one go, under a millisecond, and the sleep that lets the event loop in.
BUILD: Final = 16
YIELD_S: Final = 0.000_2
# Waits between two tries of a batch, doubling, with a quarter of jitter; a batch is given up after so many.
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 8.0
MAX_TRIES: Final = 5

_Finished = tuple[RootSpan, RequestRecord | EdgeRecord, TraceFacts]


class TraceSender:
    """Sends traces in batches from a thread of its own.

    Args:
        transport: hands a batch on.
        resource: what is told of this process.
        version: of the gateway.
        timeout_s: longest that one export may take; the thread waits, no request does.
        scrub: what recorded content goes through.
        on_change: told why the collector does not take spans, and ``None`` when it does again; by the thread.
        rng: for jitter.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        resource: Mapping[str, Value],
        version: str,
        timeout_s: float,
        scrub: Callable[[str], str],
        on_change: Callable[[str | None], None] = lambda why: None,
        rng: random.Random | None = None,
    ) -> None:
        self._transport = transport
        self._resource = resource
        self._version = version
        self._timeout_s = timeout_s
        self._scrub = scrub
        self._on_change = on_change
        self._rng = rng if rng is not None else random.Random()
        self._waiting: deque[_Finished] = deque()
        self._chars_in = self._chars_out = 0
        self._counting = threading.Lock()
        self._sent = self._dropped = self._failed = 0
        self._in_hand = 0
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-sender", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> TraceFigures:
        """What became of the traces so far."""
        waiting = len(self._waiting) + self._in_hand
        return TraceFigures(self._sent, self._dropped, self._failed, 0, waiting)

    def offer(self, root: RootSpan, record: RequestRecord | EdgeRecord, facts: TraceFacts) -> None:
        """Queue a trace; never blocks. For the event loop alone."""
        if facts.content is not None:
            chars = _chars(facts)
            if self._chars_in - self._chars_out + chars > MAX_WAITING_CHARS:
                facts = replace(facts, content=None)
            else:
                self._chars_in += chars
        self._waiting.append((root, record, facts))
        if len(self._waiting) > MAX_WAITING:
            self._drop()

    def _drop(self) -> None:
        """The oldest goes, unless the thread has just taken it."""
        oldest = self._take()
        if oldest is not None:
            self._dropped += 1

    def _take(self) -> _Finished | None:
        try:
            taken = self._waiting.popleft()
        except IndexError:
            return None
        if taken[2].content is not None:
            with self._counting:
                self._chars_out += _chars(taken[2])
        return taken

    def shutdown(self, timeout_s: float) -> bool:
        """Send what waits, for at most ``timeout_s``; not at all to a collector that failed last."""
        self._closing.set()
        self._thread.join(0.05 if self._failing else timeout_s)
        return not self._thread.is_alive() and not self._waiting and not self._in_hand

    def _run(self) -> None:
        try:
            while not self._closing.wait(DELAY_S):
                self._send_all()
            self._send_all()
        finally:
            self._transport.close()

    def _send_all(self) -> None:
        while batch := [taken for _ in range(MAX_BATCH) if (taken := self._take()) is not None]:
            self._in_hand = len(batch)
            arrived = self._send(self._built(batch))
            if arrived:
                self._sent += len(batch)
            else:
                self._failed += len(batch)
            self._in_hand = 0
            if not arrived and self._closing.is_set():
                return

    def _built(self, batch: list[_Finished]) -> bytes:
        spans: list[bytes] = []
        for number, (root, record, facts) in enumerate(batch, 1):
            spans += spans_of(root, record, facts, self._scrub)
            if number % BUILD == 0:
                time.sleep(YIELD_S)
        return request(self._resource, "sluice", self._version, spans)

    def _send(self, batch: bytes) -> bool:
        """Whether the collector took the batch, at once or later."""
        wait_s = FIRST_WAIT_S
        for number in range(1, MAX_TRIES + 1):
            try:
                self._transport.send(batch, self._timeout_s)
            except Refused as error:
                self._tell(failing=True, why=str(error))
                return False
            except TryAgain as error:
                self._tell(failing=True, why=str(error))
            else:
                self._tell(failing=False)
                return True
            if number == MAX_TRIES or self._closing.wait(wait_s * (1 + self._rng.uniform(0, 0.25))):
                return False
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return False

    def _tell(self, *, failing: bool, why: str = "") -> None:
        if failing != self._failing:
            self._failing = failing
            self._on_change(why if failing else None)


def _chars(facts: TraceFacts) -> int:
    content = facts.content
    return 0 if content is None else len(content.output) + sum(len(text) for _, text in content.messages)
