"""The records of the stream ``keys``: a key was created, changed or revoked. No record contains a key."""

from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from accounting.keys import (
    NO_BUDGET,
    NO_LIMITS,
    Budget,
    CallerRole,
    KeyLimits,
    KeyRecord,
    ModelLimits,
    StoredKey,
)
from gateway.state.port import Record

STREAM = "keys"
# Fields that have the same name and value in a record and in a key.
_SAME: Final = (
    "tenant", "max_priority", "routes", "adapters", "expires_at", "org", "tools", "models", "aliases",
)  # fmt: skip
Limits = TypeVar("Limits", KeyLimits, Budget)


class MadeLimits(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The limits and budgets of a key."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    nanousd_per_day: int | None = None
    nanousd_per_month: int | None = None


class MadeModelLimits(MadeLimits, kw_only=True):
    """The limits and budgets of a key for one model."""

    model: str


class KeyFields(MadeLimits, kw_only=True):
    """All that a key may do. An unknown field may be a restriction, so a record with one is rejected."""

    id: str
    tenant: str
    role: Literal["caller", "viewer", "front", "operator", "admin"]
    max_priority: Annotated[int, msgspec.Meta(ge=-1, le=1)]
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    expires_at: float | None = None
    comment: str = ""
    org: str | None = None
    tools: bool = True
    models: tuple[str, ...] | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    model_limits: tuple[MadeModelLimits, ...] = ()


class Made(KeyFields, tag="made", kw_only=True):
    """A key was created. ``salt`` and ``digest`` are base64."""

    prefix: str
    salt: bytes
    digest: bytes


class Changed(KeyFields, tag="changed", kw_only=True):
    """A key's fields were changed, and are these now."""


class Revoked(msgspec.Struct, tag="revoked", omit_defaults=True):
    """A key was revoked."""

    id: str


def made_data(key: StoredKey) -> bytes:
    made = Made(prefix=key.prefix, salt=key.salt, digest=key.digest, **_fields(key))
    return msgspec.json.encode(made)


def changed_data(key: StoredKey) -> bytes:
    return msgspec.json.encode(Changed(**_fields(key)))


def _fields(key: StoredKey) -> dict[str, Any]:
    record = key.record
    return {
        "id": record.key_id,
        "comment": key.comment,
        "role": record.role.value,
        "model_limits": tuple(
            MadeModelLimits(model=one.model, **asdict(one.limits), **asdict(one.budget))
            for one in record.model_limits
        ),
        **asdict(record.limits),
        **asdict(record.budget),
        **{name: getattr(record, name) for name in _SAME},
    }


def made_key(event: Made, record: Record) -> StoredKey:
    return StoredKey(
        key_record(event), event.prefix, event.salt, event.digest, event.comment, record.author, record.at
    )


def key_record(event: KeyFields) -> KeyRecord:
    return KeyRecord(
        key_id=event.id,
        role=CallerRole(event.role),
        limits=_of(NO_LIMITS, event),
        budget=_of(NO_BUDGET, event),
        model_limits=tuple(
            ModelLimits(one.model, _of(NO_LIMITS, one), _of(NO_BUDGET, one)) for one in event.model_limits
        ),
        **{name: getattr(event, name) for name in _SAME},
    )


def _of(none: Limits, event: MadeLimits) -> Limits:
    found = replace(none, **{one.name: getattr(event, one.name) for one in fields(none)})
    return none if found == none else found  # so that each request's checks need only compare identities
