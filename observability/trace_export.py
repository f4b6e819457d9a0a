"""Exports spans outside the event loop: a bounded queue of finished requests, and one exporting thread.

The thread also builds the SDK's spans of the requests. It sleeps briefly after every few spans, both while it
builds them and while the exporter encodes them, so that the event loop never waits long for the GIL.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from observability.events import RequestRecord
from observability.trace_build import OneResource, spans_of
from observability.trace_context import RootSpan
from observability.trace_exporter import ExporterErrors
from observability.trace_facts import EdgeRecord, TraceFacts, TraceFigures

# Most finished requests that wait for the collector, some 3 KB each: those of two seconds at 1,000 requests a
# second. The oldest are dropped first.
MAX_WAITING: Final = 2_048
# Most characters of recorded content that wait; further traces are sent without content.
MAX_WAITING_CHARS: Final = 8 << 20
# Requests of a batch, which has some 1,300 spans and 300 to 700 KB; collectors accept messages of 4 MB. The
# exporter's last steps process the whole batch at once, in a millisecond each.
MAX_BATCH: Final = 128
# Interval between batches: a thread that wakes for each request takes the GIL each time, and each small batch
# would cost a request to the collector.
DELAY_S: Final = 0.5
# With fewer traces, a batch is sent after so many intervals: each one is a request to the collector.
FEW, LONGEST_INTERVALS = 16, 4
# Spans that are built or encoded at once, in about a millisecond, and the sleep that lets the event loop run.
STRIDE: Final = 64
YIELD_S: Final = 0.000_2
REPORT_EVERY_S: Final = 60.0  # at most one warning in this many seconds, however often the collector fails
GIVEN_UP_S: Final = 0.05  # wait for the thread at shutdown, if the exporter's last export failed

_Finished = tuple[RootSpan, RequestRecord | EdgeRecord, TraceFacts]


class _PacedSpans(list[ReadableSpan]):
    """A list of spans; iterating over it sleeps after every ``STRIDE`` spans."""

    def __iter__(self) -> Iterator[ReadableSpan]:
        for number, span in enumerate(super().__iter__(), 1):
            if number % STRIDE == 0:
                time.sleep(YIELD_S)
            yield span


class TraceSender:
    """Exports traces in batches from a thread of its own. ``scrub`` redacts recorded content; the thread
    calls ``on_change`` with the reason when exports fail, and with ``None`` when they succeed again, at most
    once a minute each.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        resource: Resource,
        version: str,
        scrub: Callable[[str], str],
        on_change: Callable[[str | None], None] = lambda why: None,
        clock: Callable[[], float] = time.monotonic,
        delay_s: float = DELAY_S,
    ) -> None:
        self._exporter = exporter
        self._resource, self._scope = OneResource(resource), InstrumentationScope("sluice", version)
        self._scrub = scrub
        self._on_change = on_change
        self._clock = clock
        self._delay_s = delay_s
        self._waiting: deque[_Finished] = deque()
        self._chars_in = self._chars_out = 0
        self._counting = threading.Lock()
        self._sent = self._dropped = self._failed = 0
        self._sending = 0
        self._errors = ExporterErrors(exporter, self._report)
        self._why = ""
        self._failing = self._reported = False
        self._reported_at = -REPORT_EVERY_S
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="trace-sender", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> TraceFigures:
        waiting = len(self._waiting) + self._sending
        return TraceFigures(self._sent, self._dropped, self._failed, waiting=waiting)

    def offer(self, root: RootSpan, record: RequestRecord | EdgeRecord, facts: TraceFacts) -> None:
        """Queue a trace; never blocks. Only the event loop may call it."""
        if facts.content is not None:
            chars = facts.content.chars
            if self._chars_in - self._chars_out + chars > MAX_WAITING_CHARS:
                facts = replace(facts, content=None)
            else:
                self._chars_in += chars
        self._waiting.append((root, record, facts))
        if len(self._waiting) > MAX_WAITING and self._take() is not None:  # the thread may have taken it
            self._dropped += 1

    def _take(self) -> _Finished | None:
        try:
            taken = self._waiting.popleft()
        except IndexError:
            return None
        content = taken[2].content
        if content is not None:
            with self._counting:
                self._chars_out += content.chars
        return taken

    def shutdown(self, timeout_s: float) -> bool:
        """Send queued traces, for at most ``timeout_s``; none when the last export failed.

        An export in progress after that is abandoned with its thread.
        """
        self._closing.set()
        if self._failing:
            self._close()
            timeout_s = GIVEN_UP_S
        self._thread.join(timeout_s)
        self._close()
        return not self._thread.is_alive() and not self._waiting and not self._sending

    def _close(self) -> None:
        """End the exporter's waits between its retries."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()

    def _run(self) -> None:
        self._errors.listen()
        intervals = 0
        try:
            while not self._closing.wait(self._delay_s):
                intervals += 1
                if intervals >= LONGEST_INTERVALS or len(self._waiting) >= FEW:
                    self._send_all()
                    intervals = 0
            self._send_all()
        finally:
            self._errors.close()

    def _send_all(self) -> None:
        while batch := [taken for _ in range(MAX_BATCH) if (taken := self._take()) is not None]:
            self._sending = len(batch)
            arrived = self._send(batch)
            if arrived:
                self._sent += len(batch)
            else:
                self._failed += len(batch)
            self._sending = 0
            if not arrived and self._closing.is_set():
                return

    def _built(self, batch: list[_Finished]) -> list[ReadableSpan]:
        spans, pause_at = _PacedSpans(), STRIDE
        for root, record, facts in batch:
            spans += spans_of(root, record, facts, self._scrub, self._resource, self._scope)
            if len(spans) >= pause_at:
                time.sleep(YIELD_S)
                pause_at = len(spans) + STRIDE
        return spans

    def _send(self, batch: list[_Finished]) -> bool:
        """Export a batch; returns whether the collector accepted it."""
        try:
            taken = self._exporter.export(self._built(batch)) is SpanExportResult.SUCCESS
        except Exception as error:
            # For example a channel that was closed meanwhile; the loss is counted and reported like others.
            taken, self._why = False, type(error).__name__
        self._report(None if taken else self._why or "no reason given")
        return taken

    def _report(self, why: str | None) -> None:
        """Report the reason of a failure, which the exporter logs with each try; ``None``: no failure."""
        self._failing, self._why = why is not None, why or ""
        if why is None:
            if self._reported:
                self._reported = False
                self._on_change(None)
        elif not self._reported and self._clock() - self._reported_at >= REPORT_EVERY_S:
            self._reported, self._reported_at = True, self._clock()
            self._on_change(why)
