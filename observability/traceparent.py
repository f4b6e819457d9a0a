"""The W3C trace context: the caller's header, and the header of outgoing calls."""

import re
from dataclasses import dataclass

# version-traceid-parentid-flags, lower-case hex. Versions above 00 may have more fields after another dash.
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
# Longer headers are ignored; version 00 has 55 characters.
MAX_HEADER = 512
MAX_MEMBERS = 32
SAMPLED = 0x01
# key=value; the value has printable characters but comma and equals sign, and does not end in a space.
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])?"
)


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span: 32 and 16 hex digits, and the flags' byte."""

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


def format_traceparent(trace_id: str, span_id: str, flags: int) -> str:
    """The header to send on, version 00."""
    return f"00-{trace_id}-{span_id}-{flags & 0xFF:02x}"
