"""One root span per customer-visible response, with child spans; built after its end.

A request has a :class:`RootSpan` (ids and start) from its arrival. All other work is done once, after
:meth:`Tracing.finish`, and only for sampled traces: the sending thread builds the spans from the finished
record. There is no work per token. A request that never reaches ``finish`` has no trace.
"""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from observability.events import RequestRecord
from observability.trace_facts import (
    NO_FACTS,
    NO_TRACES,
    EdgeRecord,
    TraceFacts,
    TraceFigures,
    head_keeps,
    tail_keeps,
)

if TYPE_CHECKING:  # it imports OpenTelemetry's SDK
    from observability.trace_export import TraceSender

# version-traceid-parentid-flags, lower-case hex. Versions above 00 may have more fields after another dash.
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
# Longer headers are ignored; version 00 has 55 characters.
MAX_HEADER = 512
MAX_MEMBERS = 32
SAMPLED = 0x01
# key=value; the value has printable characters except comma and equals sign, and does not end in a space.
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])?"
)


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span: ids of 32 and 16 hex digits, and the byte of flags."""

    trace_id: str
    span_id: str
    flags: int


def parse_traceparent(header: str | None) -> Parent | None:
    """The caller's span, or ``None`` for a header that is absent or not valid: then a new trace starts."""
    if not header or len(header) > MAX_HEADER:
        return None
    match = _HEADER.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if trace_id == "0" * 32 or span_id == "0" * 16:
        return None
    return Parent(trace_id, span_id, int(flags, 16))


def usable_tracestate(header: bytes | None) -> str | None:
    """The caller's ``tracestate``, unchanged; ``None`` unless it is a list of at most 32 members.

    Bounds of the W3C Trace Context, level 1: 512 characters must be accepted, 32 members are allowed.
    """
    if not header or len(header) > MAX_HEADER:
        return None
    text = header.decode("latin-1").strip(" \t")
    members = text.split(",")
    if len(members) > MAX_MEMBERS or not all(_MEMBER.fullmatch(one.strip(" \t")) for one in members):
        return None
    return text


# Longest wait at shutdown for the last spans, in seconds; shorter if the last export failed.
SHUTDOWN_TIMEOUT_S = 1.0
# 2**64 divided by the golden ratio; odd, so that the span numbers of one trace give distinct ids.
_STRIDE = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


class RootSpan(Struct, frozen=True):
    """A request's position in its trace, known from its arrival. ``trace_id`` and ``trace_state`` are the
    caller's if it sent valid ones, ``flags`` is the byte for outgoing calls; ``sampled``: the trace is sent
    whatever the request's result.
    """

    trace_id: str
    span_id: int
    parent_id: int | None
    flags: int
    started_ns: int
    sampled: bool = False
    trace_state: str | None = None

    def child_id(self, number: int) -> int:
        """The span id of the trace's child with this ``number``, from 1."""
        return ((self.span_id + number * _STRIDE) & _MASK) or 1

    def headers(self, number: int) -> bytes:
        """The trace context as HTTP header lines, with the span of that number as the parent."""
        child = self.child_id(number)
        lines = b"traceparent: 00-%b-%016x-%02x\r\n" % (self.trace_id.encode(), child, self.flags)
        if self.trace_state is not None:
            lines += b"tracestate: %b\r\n" % self.trace_state.encode()
        return lines


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
        figures = NO_TRACES if self._sender is None else self._sender.figures
        return TraceFigures(figures.sent, figures.dropped, figures.failed, self._left_out, figures.waiting)

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
            trace_id, flags, state = parent.trace_id, parent.flags, trace_state
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
        facts: Callable[[], TraceFacts] = lambda: NO_FACTS,
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
