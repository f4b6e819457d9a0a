"""One root span per customer-visible response, with child spans; built after its end.

A request has a :class:`RootSpan` (ids and start) from its arrival. All other work is done once, after
:meth:`Tracing.finish`, and only for sampled traces: the sending thread builds the spans from the finished
record. There is no work per token. A request that never reaches ``finish`` has no trace.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from observability.events import RequestRecord
from observability.trace_context import KNOWN_FLAGS, SAMPLED, RootSpan, parse_traceparent
from observability.trace_facts import EdgeRecord, TraceFacts, TraceFigures, head_keeps, tail_keeps

if TYPE_CHECKING:  # it imports OpenTelemetry's SDK
    from observability.trace_export import TraceSender

# Longest wait at shutdown for the last spans, in seconds; shorter if the last export failed.
SHUTDOWN_TIMEOUT_S = 1.0


class Tracing:
    """Makes trace ids, and spans if there is a ``sender``.

    ``sample_ratio`` is the share of traces sampled by their id, whatever their result, so that all services
    with the same ratio sample the same traces. Others are sampled if they ended in an error or a fallback,
    were resumed, or were slow; with ``follow_callers`` also if the caller sampled them. The caller's flag
    cannot suppress sampling, so that no caller can hide requests from the operator.
    """

    def __init__(
        self,
        sender: "TraceSender | None" = None,
        *,
        sample_ratio: float = 1.0,
        follow_callers: bool = False,
        rng: random.Random | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._sender = sender
        self.exporting = sender is not None  # whether spans are sent
        self._ratio = sample_ratio
        self._follow = follow_callers
        self._random = (rng if rng is not None else random.Random()).getrandbits
        self._unix_ns = unix_ns
        self._left_out = 0

    @property
    def figures(self) -> TraceFigures:
        figures = TraceFigures() if self._sender is None else self._sender.figures
        return replace(figures, left_out=self._left_out)

    def begin(
        self,
        traceparent: str | None = None,
        *,
        trace_id: str | None = None,
        trace_state: str | None = None,
        ago_s: float = 0.0,
    ) -> RootSpan:
        """A new root span that started ``ago_s`` ago; a child of the caller's if ``traceparent`` is valid.

        ``trace_id`` (32 hex digits) is an id that was sent already; a valid ``traceparent`` takes precedence.
        ``trace_state`` is used only with a valid ``traceparent``.
        """
        parent = parse_traceparent(traceparent) if traceparent else None
        flags, parent_id, state = 0, None, None
        if parent is not None:
            trace_id, flags, state = parent.trace_id, parent.flags & KNOWN_FLAGS, trace_state
            parent_id = int(parent.span_id, 16)
        elif trace_id is None:
            trace_id = f"{self._random(128) or 1:032x}"
        sampled = self._sender is not None and (
            head_keeps(trace_id, self._ratio) or (self._follow and bool(flags & SAMPLED))
        )
        return RootSpan(
            trace_id,
            self._random(64) or 1,
            parent_id,
            flags | SAMPLED if sampled else flags,
            self._unix_ns() - int(ago_s * 1e9),
            sampled,
            state,
        )

    def finish(
        self,
        root: RootSpan,
        record: RequestRecord | EdgeRecord,
        facts: Callable[[], TraceFacts] = TraceFacts,
        *,
        slow: bool = False,
    ) -> None:
        """End ``root`` with the request's record. Call once; never blocks.

        ``facts`` is called only for a sampled trace; ``slow``: sample it in any case.
        """
        if self._sender is None:
            return
        if root.sampled or slow or tail_keeps(record):
            self._sender.offer(root, record, facts())
        else:
            self._left_out += 1

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """Send queued traces, for at most ``timeout_s``; returns whether all were sent. Call in a thread."""
        return self._sender is None or self._sender.shutdown(timeout_s)
