"""OTLP's protobuf of finished requests, written straight from their records.

A request has some ten spans and forty attributes. Through the SDK's span objects and its encoder they cost
205 us of CPU, through the messages of ``opentelemetry-proto`` 48, this way about 20 (``docs/decisions``);
tests read the bytes back with the official messages. Field numbers: opentelemetry-proto 1.x, stable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from observability.attributes import Value

KIND_INTERNAL, KIND_SERVER, KIND_CLIENT = 1, 2, 3
# The lower byte is the W3C flags; the two bits say whether the parent is known to be remote, or not.
_SAMPLED, _PARENT_KNOWN, _PARENT_REMOTE = 0x001, 0x100, 0x200

_double = struct.Struct("<d").pack
_times = struct.Struct("<BQBQ").pack
_fixed64 = struct.Struct("<Q").pack
_flags = struct.Struct("<I").pack


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _piece(tag: bytes, data: bytes) -> bytes:
    """A field with a length."""
    size = len(data)
    return b"%b%c%b" % (tag, size, data) if size < 128 else tag + _varint(size) + data


@lru_cache(maxsize=1_024)  # names are few
def _name(name: str) -> bytes:
    return _piece(b"\x0a", name.encode("utf-8", "replace"))


def _any(value: Value) -> bytes:
    """An ``AnyValue``."""
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return b"\x21" + _double(value)
    if isinstance(value, tuple):
        items = b"".join([_piece(b"\x0a", _any(one)) for one in value])
        return _piece(b"\x2a", items)
    return _piece(b"\x0a", value.encode("utf-8", "replace"))


def _attribute(tag: bytes, name: str, value: Value) -> bytes:
    return _piece(tag, _name(name) + _piece(b"\x12", _any(value)))


# What says the same in most requests: tenants, routes, versions, small counts. True is not 1.
_often = lru_cache(maxsize=8_192, typed=True)(_attribute)
# What never says the same twice.
_ONCE = frozenset({"sluice.request_id", "gen_ai.response.id"})
_LONGEST_KEPT = 64
_LARGEST_KEPT = 1 << 12


@lru_cache(maxsize=1_024)
def _before_float(tag: bytes, name: str) -> bytes:
    """All of a float's attribute but its eight bytes."""
    return _attribute(tag, name, 0.0)[:-8]


def attributes_of(tag: bytes, values: Mapping[str, Value]) -> bytes:
    """Repeated ``KeyValue`` fields."""
    parts = []
    for name, value in values.items():
        if isinstance(value, str):
            often = len(value) < _LONGEST_KEPT and name not in _ONCE
        elif isinstance(value, float):
            parts.append(_before_float(tag, name) + _double(value))
            continue
        else:
            often = isinstance(value, tuple) or 0 <= value < _LARGEST_KEPT
        parts.append((_often if often else _attribute)(tag, name, value))
    return b"".join(parts)


def event(name: str, at_ns: int, values: Mapping[str, Value]) -> bytes:
    """A span's event, as a field of it."""
    data = b"\x09" + _fixed64(at_ns) + _piece(b"\x12", name.encode()) + attributes_of(b"\x1a", values)
    return _piece(b"\x5a", data)


@lru_cache(maxsize=1_024)
def _named(name: str, kind: int) -> bytes:
    return _piece(b"\x2a", name.encode("utf-8", "replace")) + b"\x30%c" % kind


@dataclass(frozen=True, slots=True)
class Parent:
    """What the spans below one span have in common: the fields of their trace and parent."""

    head: bytes
    tail: bytes

    @staticmethod
    def of(trace_id: bytes, parent_id: int | None, *, remote: bool = False) -> Parent:
        """The fields; ``trace_id`` has 16 bytes, a root may have no parent, or another service's."""
        head, flags = b"\x0a\x10" + trace_id, _SAMPLED
        if parent_id is not None:
            head += b"\x22\x08" + parent_id.to_bytes(8, "big")
            flags |= _PARENT_KNOWN | (_PARENT_REMOTE if remote else 0)
        return Parent(head + b"\x12\x08", b"\x85\x01" + _flags(flags))


def span(
    parent: Parent, span_id: int, name: str, kind: int, began_ns: int, ended_ns: int, more: bytes = b""
) -> bytes:
    """A ``Span``, as a field of ``ScopeSpans``.

    ``more`` are further fields: :func:`attributes_of` with :data:`ATTRIBUTE`, :func:`event`, :func:`failed`,
    :func:`state`.
    """
    data = b"%b%b%b%b%b%b" % (
        parent.head,
        span_id.to_bytes(8, "big"),
        _named(name, kind),
        _times(0x39, began_ns, 0x41, ended_ns if ended_ns > began_ns else began_ns),
        more,
        parent.tail,
    )
    size = len(data)
    return b"\x12%c%b" % (size, data) if size < 128 else b"\x12" + _varint(size) + data


def failed(error: str) -> bytes:
    """A span's status: an error."""
    return _piece(b"\x7a", _piece(b"\x12", error.encode("utf-8", "replace")) + b"\x18\x02")


def state(trace_state: str) -> bytes:
    """A span's ``tracestate``."""
    return _piece(b"\x1a", trace_state.encode())


ATTRIBUTE = b"\x4a"
"""The tag of a span's attributes."""


def request(resource: Mapping[str, Value], scope: str, version: str, spans: Iterable[bytes]) -> bytes:
    """An ``ExportTraceServiceRequest``."""
    told = _piece(b"\x0a", _name(scope) + _piece(b"\x12", version.encode()))
    of_scope = _piece(b"\x12", told + b"".join(spans))
    of_resource = _piece(b"\x0a", attributes_of(b"\x0a", resource))
    return _piece(b"\x0a", of_resource + of_scope)
