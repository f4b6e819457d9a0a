"""The records of the stream ``keys``: a key was created or revoked. No record contains a key."""

from dataclasses import asdict
from typing import Annotated, Literal

import msgspec

from accounting.keys import Budget, CallerRole, KeyLimits, KeyRecord, ModelLimits, StoredKey
from gateway.state.port import Record

STREAM = "keys"


class MadeModelLimits(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a key may ask of one model."""

    model: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    nanousd_per_day: int | None = None
    nanousd_per_month: int | None = None


class Made(msgspec.Struct, tag="made", forbid_unknown_fields=True, omit_defaults=True):
    """A key was created. ``salt`` and ``digest`` are base64.

    An unknown field may be a restriction, so a record with one is not understood.
    """

    id: str
    prefix: str
    salt: bytes
    digest: bytes
    tenant: str
    role: Literal["caller", "viewer", "front", "operator", "admin"]
    max_priority: Annotated[int, msgspec.Meta(ge=-1, le=1)]
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    expires_at: float | None = None
    comment: str = ""
    org: str | None = None
    nanousd_per_day: int | None = None
    nanousd_per_month: int | None = None
    tools: bool = True
    models: tuple[str, ...] | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    model_limits: tuple[MadeModelLimits, ...] = ()


class Revoked(msgspec.Struct, tag="revoked", omit_defaults=True):
    """A key was revoked."""

    id: str
    comment: str = ""


def made_data(key: StoredKey) -> bytes:
    """The record of a created key."""
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
            record.budget.nanousd_per_day,
            record.budget.nanousd_per_month,
            record.tools,
            record.models,
            record.aliases,
            tuple(
                MadeModelLimits(one.model, **asdict(one.limits), **asdict(one.budget))
                for one in record.model_limits
            ),
        )
    )


def revoked_data(key_id: str, comment: str) -> bytes:
    """The record of a revoked key."""
    return msgspec.json.encode(Revoked(key_id, comment))


def key_event(record: Record) -> StoredKey | Revoked:
    """Decode a record. Raises msgspec.MsgspecError when it is not understood."""
    event = msgspec.json.decode(record.data, type=Made | Revoked)
    if isinstance(event, Revoked):
        return event
    return StoredKey(
        KeyRecord(
            event.id,
            event.tenant,
            CallerRole(event.role),
            event.max_priority,
            event.routes,
            event.adapters,
            KeyLimits(event.requests_per_minute, event.tokens_per_minute, event.tokens_per_day),
            event.expires_at,
            event.org,
            Budget(event.nanousd_per_day, event.nanousd_per_month),
            event.tools,
            event.models,
            event.aliases,
            tuple(
                ModelLimits(
                    one.model,
                    KeyLimits(one.requests_per_minute, one.tokens_per_minute, one.tokens_per_day),
                    Budget(one.nanousd_per_day, one.nanousd_per_month),
                )
                for one in event.model_limits
            ),
        ),
        event.prefix,
        event.salt,
        event.digest,
        event.comment,
        record.author,
        record.at,
    )
