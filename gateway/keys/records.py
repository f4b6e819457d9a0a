"""A key's life as records of the stream ``keys``: made, revoked. No record holds a key."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from accounting.keys import KeyLimits, KeyRecord, KeyRole, StoredKey
from gateway.state.port import Record


class Made(msgspec.Struct, tag="made", forbid_unknown_fields=True, omit_defaults=True):
    """A key was made. ``salt`` and ``digest`` are base64.

    A field that this version does not know may forbid something: such a record is not understood.
    """

    id: str
    prefix: str
    salt: bytes
    digest: bytes
    tenant: str
    role: Literal["caller", "operator", "admin"]
    max_priority: Annotated[int, msgspec.Meta(ge=-1, le=1)]
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    expires_at: float | None = None
    comment: str = ""
    org: str | None = None


class Revoked(msgspec.Struct, tag="revoked", omit_defaults=True):
    """A key was revoked."""

    id: str
    comment: str = ""


def made_data(key: StoredKey) -> bytes:
    """The record of a key that is made."""
    record, limits = key.record, key.record.limits
    return msgspec.json.encode(
        Made(
            record.key_id,
            key.prefix,
            key.salt,
            key.digest,
            record.tenant,
            record.role.value,
            record.max_priority,
            record.routes,
            record.adapters,
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.tokens_per_day,
            record.expires_at,
            key.comment,
            record.org,
        )
    )


def revoked_data(key_id: str, comment: str) -> bytes:
    """The record of a key that is revoked."""
    return msgspec.json.encode(Revoked(key_id, comment))


def key_event(record: Record) -> StoredKey | Revoked:
    """What a record says. Raises msgspec.MsgspecError for what is not understood."""
    event = msgspec.json.decode(record.data, type=Made | Revoked)
    if isinstance(event, Revoked):
        return event
    return StoredKey(
        KeyRecord(
            event.id,
            event.tenant,
            KeyRole(event.role),
            event.max_priority,
            event.routes,
            event.adapters,
            KeyLimits(event.requests_per_minute, event.tokens_per_minute, event.tokens_per_day),
            event.expires_at,
            event.org,
        ),
        event.prefix,
        event.salt,
        event.digest,
        event.comment,
        record.author,
        record.at,
    )
