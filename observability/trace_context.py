"""The trace context of W3C: the caller's span, and a request's own span with the headers for calls."""

import re
from dataclasses import dataclass

from msgspec import Struct

# version-traceid-parentid-flags, lower-case hex. Versions above 00 may have more fields after another dash.
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
# Longer headers are ignored; version 00 has 55 characters.
MAX_HEADER = 512
MAX_MEMBERS = 32
SAMPLED = 0x01
# ``sampled`` and ``random-trace-id``; the other flags are not passed on (W3C Trace Context, level 2).
KNOWN_FLAGS = 0x03
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
