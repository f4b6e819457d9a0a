"""The W3C trace context header: who called us, and what we tell those we call."""

from __future__ import annotations

import re
from dataclasses import dataclass

# version-traceid-parentid-flags, lower-case hex. Versions above 00 may carry more behind another dash.
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
# Longer headers than this are nobody's trace context; version 00 has 55 characters.
MAX_HEADER = 512
SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span: 32 and 16 hex digits, and the flags' byte."""

    trace_id: str
    span_id: str
    flags: int


def parse_traceparent(header: str | None) -> Parent | None:
    """The caller's span, or ``None`` for a header that is absent or not valid: then a new trace begins."""
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


def format_traceparent(trace_id: str, span_id: str, flags: int) -> str:
    """The header to send on, version 00."""
    return f"00-{trace_id}-{span_id}-{flags & 0xFF:02x}"
